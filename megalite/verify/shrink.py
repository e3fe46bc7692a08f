"""Shrinks the user's config until it trains in fp64 on a CPU within seconds, and keeps every feature that it had.

What a layout can get wrong stays: which axes there are, whether sizes split evenly, whether ranks share key-value
heads, grouped queries, padding and uneven rows of the vocabulary, accumulation over microbatches, a pipeline's schedule
with more or fewer of them than ranks, uneven and empty stages, recompute, clipping. Only counts shrink, each in units
of its axis. No torch import.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm, sqrt
from typing import Any, TypeVar

from megalite.config.derive import derive
from megalite.config.parallel_rules import layout_request, stage_settings
from megalite.config.rules import check
from megalite.config.schedule_rules import default_group_size
from megalite.config.schema import Config, ModelConfig, ParallelConfig, TrainConfig
from megalite.layout.layout_rules import layout_of
from megalite.layout.ranks import ParallelLayout
from megalite.layout.stage_string import layout_text
from megalite.layout.stages import stage_layers

STEPS = 5  # the design's equivalence test
MOST_RANKS = 8  # above, every axis shrinks to 2
SEQ_LENGTH = 16
EPS = 1e-8  # a smaller one turns rounding of gradients that are zero into steps of the parameters
CLIP = 0.05  # below the gradient norm of the small models, so that clipping acts
AXES = ("tp", "cp", "pp", "vpp", "ep", "etp")
VOCABULARIES = {"byte": 257, "char": 65}  # unless model.vocab_size is set; of other tokenizers ASSUMED
ASSUMED = 50257
CAPS = tuple(2**power for power in range(1, 21))


Value = TypeVar("Value")


def derived(value: Value | None) -> Value:
    """A setting that derivation has filled in."""
    assert value is not None
    return value


@dataclass(frozen=True)
class Shrunk:
    """`config` runs on `layout` in place of `asked` on `asked_layout`; `notes` say what else changed."""

    config: Config
    layout: ParallelLayout
    asked: Config
    asked_layout: ParallelLayout
    notes: tuple[str, ...]

    @property
    def reference(self) -> Config:
        """The same training on one process."""
        optimizer = replace(self.config.optimizer, instances=1)
        return derive(replace(self.config, parallel=ParallelConfig(), optimizer=optimizer))


def shrink(config: Config, world_size: int) -> Shrunk:
    """`config` is checked and derived for `world_size` ranks; so is the small one."""
    asked = layout_of(layout_request(config, world_size))
    axes, dp = _axes(config.parallel, asked)
    run = ParallelLayout(tp=axes.tp, cp=axes.cp, dp=dp, pp=axes.pp, vpp=axes.vpp)
    known = replace(config, model=replace(config.model, vocab_size=vocabulary_of(config)))
    for cap in CAPS:  # the smallest that keeps every rule, those of axes that are built later included
        small = _shrunk(known, asked, run, axes, cap)
        if not check(small, run.world_size):
            layout = layout_of(layout_request(small, run.world_size))
            return Shrunk(derive(small, run.world_size), layout, config, asked, tuple(_notes(config, asked, layout)))
    raise AssertionError(check(small, run.world_size))


def vocabulary_of(config: Config) -> int:
    """model.vocab_size, or what the tokenizer will say as far as its name tells."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    return VOCABULARIES.get(config.tokenizer, config.data.bpe_vocab_size if config.tokenizer == "bpe" else ASSUMED)


def _axes(axes: ParallelConfig, asked: ParallelLayout) -> tuple[ParallelConfig, int]:
    """Sizes of all axes, and dp: as asked, or at most 2 each."""
    parallel = replace(axes, nccl_options=None)
    if asked.world_size <= MOST_RANKS:
        return parallel, asked.dp
    sizes: dict[str, Any] = {axis: min(2, getattr(axes, axis) or 1) for axis in AXES}
    parallel = replace(parallel, **sizes)
    request = layout_request(replace(Config(), parallel=parallel), 1)
    world = min(2, asked.dp) * request.dense_product
    unit = lcm(request.dense_product, request.expert_product)
    return parallel, -(-world // unit) * unit // request.dense_product


def _shrunk(config: Config, asked: ParallelLayout, run: ParallelLayout, axes: ParallelConfig, cap: int) -> Config:
    """Every count of things on one rank is `cap` or a few times that, at most."""
    microbatches, group_size = _microbatches(config, asked, run, cap)
    train = _train(config.train, asked, run, microbatches)
    num_layers, parallel = _stages(config, replace(axes, microbatch_group_size=group_size), cap)
    model = _model(config.model, asked, run, cap)
    model.num_layers = num_layers
    layers = config.train.recompute_layers
    if layers is not None:
        every = layers >= config.model.num_layers
        train.recompute_layers = num_layers if every else max(1, num_layers // 2)
    if model.max_positions is not None and model.position == "learned":
        model.max_positions = train.seq_length + min(8, model.max_positions - config.train.seq_length)
    if model.loss_chunk_tokens is not None:
        before, now = (derived(each.micro_batch_size) * each.seq_length for each in (config.train, train))
        model.loss_chunk_tokens = max(1, model.loss_chunk_tokens * now // before)
    peak, lr = min(config.optimizer.lr, 1e-2), config.lr
    return replace(
        config,
        run_dir=None,
        device="cpu",
        precision="fp64",
        tokenizer="byte",
        model=model,
        parallel=parallel,
        train=train,
        optimizer=replace(
            config.optimizer,
            lr=peak,
            eps=max(config.optimizer.eps, EPS),
            clip_grad=min(config.optimizer.clip_grad, CLIP),
        ),
        lr=replace(
            lr,
            warmup_steps=min(derived(lr.warmup_steps), 1),
            decay_steps=min(derived(lr.decay_steps), 2),
            min_lr=min(derived(lr.min_lr), peak),
        ),
        data=replace(config.data, source="stdlib", path=None, weights=None),
        checkpoint=replace(config.checkpoint, init_from=None),
    )


def _stages(config: Config, axes: ParallelConfig, cap: int) -> tuple[int, ParallelConfig]:
    """Layers of the model, and who holds them: by the same settings, with uneven and empty stages where some were."""
    asked, pp, vpp = stage_settings(config), axes.pp, axes.vpp
    counts = [stage.count for stage in stage_layers(asked)]
    if asked.layout is not None:
        kept = [counts[at * (len(counts) - 1) // max(1, pp * vpp - 1)] for at in range(pp * vpp)]
        few = _fewer(kept, cap)
        small = [few[count] for count in kept]
        small[-1] += not sum(small)
        return sum(small), replace(axes, pipeline_layout=layout_text(small))
    if counted := asked.count_embedding + asked.count_loss:
        each = min(max(counts[0] + asked.count_embedding, counts[-1] + asked.count_loss), cap)
        layers = pp * vpp * each - counted
        return layers if layers > 0 else layers + pp * vpp, axes
    first = None if axes.first_stage_layers is None else counts[0]
    last = None if axes.last_stage_layers is None else counts[-1]
    others = pp - asked.standalone_embedding - (first is not None) - (last is not None)
    between = next((count for count in counts[1:] if count), counts[0])
    few = _fewer([first or 0, last or 0, between if others else 0], cap)
    total = vpp * (few[first or 0] + few[last or 0] + (others * few[between] if others else 0))
    if total == 0:  # the layers were on ranks in between, of which there are none now
        total, last = vpp, 1
    return total, replace(
        axes,
        first_stage_layers=None if first is None else vpp * few[first],
        last_stage_layers=None if last is None else vpp * few.get(last, 1),
    )


def _fewer(counts: Sequence[int], cap: int) -> dict[int, int]:
    """A small number for each count: equal counts stay equal, larger ones stay larger, and 0 stays 0."""
    several = sorted({*counts} - {0})
    if len(several) == 1:
        return {0: 0, several[0]: min(several[0], cap)}
    return {0: 0} | {count: at for at, count in enumerate(several, 1)}


def _microbatches(config: Config, asked: ParallelLayout, run: ParallelLayout, cap: int) -> tuple[int, int | None]:
    """Microbatches of a step, and how many make a group (interleaved; None: as many as derived).

    They are fewer than pipeline ranks, as many or more if they were, and a multiple of the group if they were.
    """
    group_size = config.parallel.microbatch_group_size
    number = config.train.global_batch_size // (derived(config.train.micro_batch_size) * asked.dp)
    if group_size is not None and number % group_size:
        return 2 * run.pp + 1, run.pp + 1
    few = run.pp * min(number // asked.pp, cap) + min(number % asked.pp, run.pp - 1)
    if group_size is None:
        return few, None
    usual = group_size == default_group_size(asked.pp, number) and few % default_group_size(run.pp, few) == 0
    return few, None if usual else few


def _model(model: ModelConfig, asked: ParallelLayout, run: ParallelLayout, cap: int) -> ModelConfig:
    heads, kv_heads = _heads(model, asked.tp, run.tp, cap)
    head_size = min(derived(model.head_size), 4 * cap)
    all_heads, before = heads * head_size, model.num_attention_heads * derived(model.head_size)
    hidden = max(1, all_heads * model.hidden_size // before)  # as wide as the heads together, or narrower
    if model.hidden_size > before:
        hidden = min(2 * all_heads, -(-all_heads * model.hidden_size // before))
    vocab_size, multiple = _vocabulary(model, asked.tp, run.tp)
    return replace(
        model,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_size=head_size,
        ffn_hidden_size=run.tp * min(derived(model.ffn_hidden_size) // asked.tp, 6 * cap),
        vocab_size=vocab_size,
        vocab_multiple=multiple,
        init_std=model.init_std * sqrt(model.hidden_size / hidden),  # activations keep their size
    )


def _heads(model: ModelConfig, tp: int, run: int, cap: int) -> tuple[int, int]:
    """Query and key-value heads. Ranks share a key-value head where they did; groups stay groups."""
    heads, kv_heads = model.num_attention_heads, derived(model.num_key_value_heads)
    sharers = max(1, tp // kv_heads)  # ranks of one key-value head
    sharers_run = min(sharers, run)
    kv_heads_run = run // sharers_run * (min(kv_heads // tp, cap) if kv_heads >= tp else 1)
    return kv_heads_run * sharers_run * min(heads // kv_heads // sharers, cap), kv_heads_run


def _vocabulary(model: ModelConfig, tp: int, run: int) -> tuple[int, int]:
    """Vocabulary and its multiple: as much padding as before, rows that split evenly over tp only if they did."""
    size, multiple = derived(model.vocab_size), model.vocab_multiple
    count = -(-size // multiple)
    padding, uneven = count * multiple - size, count * multiple % tp != 0
    for unit in (multiple, multiple + 1):
        for few in range(min(count, 2 * run), min(count, 3 * run) + 2):
            if (few * unit % run != 0) == uneven:
                return few * unit - padding, unit
    raise AssertionError((model, tp, run))


def _train(train: TrainConfig, asked: ParallelLayout, run: ParallelLayout, microbatches: int) -> TrainConfig:
    unit = 2 * run.tp * run.cp  # context parallelism cuts twice as many pieces as it has ranks
    length = max(1, SEQ_LENGTH // unit) * unit
    small = min(derived(train.micro_batch_size), 2)
    return replace(
        train,
        steps=STEPS,
        seq_length=length if train.seq_length % (asked.tp * asked.cp) == 0 else length + 1,
        micro_batch_size=small,
        global_batch_size=small * run.dp * microbatches,
        compile=False,
        record_pipeline=0,
        batch_ramp=None,
        skip_steps=[],
        profile_steps=[],
    )


def _notes(config: Config, asked: ParallelLayout, run: ParallelLayout) -> Iterator[str]:
    """What is not as the user asked for, besides sizes."""
    model = config.model
    if asked.world_size > MOST_RANKS:
        yield f"above {MOST_RANKS} ranks each axis shrinks to 2: {run.world_size} ranks run for {asked.world_size}"
    if config.train.compile:
        yield "train.compile is off: this checks the layout, not the compiler"
    if config.train.batch_ramp is not None:
        yield "train.batch_ramp is off: all batches hold as many sequences"
    if config.optimizer.eps < EPS:
        yield f"optimizer.eps is {EPS:g}: a smaller one makes steps of rounding errors"
    if model.vocab_size is None:
        yield f"model.vocab_size is taken as {vocabulary_of(config):,}: the tokenizer is not asked (set it to be exact)"

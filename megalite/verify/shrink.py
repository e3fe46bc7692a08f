"""Shrinks the user's config until it trains in fp64 on a CPU within seconds, and keeps every feature that it had.

What a layout can get wrong stays: which axes there are, whether sizes split evenly, whether ranks share key-value
heads, grouped queries, padding and uneven rows of the vocabulary, accumulation over microbatches, a pipeline's schedule
with more or fewer of them than ranks, uneven and empty stages, recompute, clipping. Only counts shrink, each in units
of its axis. No torch import.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from megalite.config.derive import derive
from megalite.config.parallel_rules import dense_ranks, layout_of, least_world, stage_settings
from megalite.config.remedies import Case
from megalite.config.rules import check
from megalite.config.schedule_rules import default_group_size
from megalite.config.schema import Config, ParallelConfig
from megalite.config.settings import with_values
from megalite.layout.ranks import ParallelLayout
from megalite.layout.stage_string import layout_text
from megalite.layout.stages import stage_layers

MOST_RANKS = 8  # above, every axis shrinks to 2
FEW = 2  # at most so many of a thing on one rank, or a few times that
SEQ_LENGTH = 16
EPS = 1e-8  # a smaller one turns rounding of gradients that are zero into steps of the parameters
CLIP = 0.05  # below the gradient norm of the small models, so that clipping acts
AXES = ("tp", "cp", "pp", "vpp", "ep", "etp")
VOCABULARIES = {"byte": 257, "char": 65}  # unless model.vocab_size is set; of other tokenizers ASSUMED
ASSUMED = 50257
ALWAYS: dict[str, Any] = {
    "device": "cpu",
    "precision": "fp64",
    "tokenizer": "byte",
    "data.source": "stdlib",
    "train.steps": 5,  # the design's equivalence test
    "train.record_pipeline": 0,
    "train.skip_steps": [],
    "train.profile_steps": [],
    **dict.fromkeys(("train.compile", "parallel.standalone_embedding"), False),
    **dict.fromkeys(("parallel.count_embedding", "parallel.count_loss"), False),
    **dict.fromkeys(("parallel.first_stage_layers", "parallel.last_stage_layers", "parallel.nccl_options"), None),
    **dict.fromkeys(("run_dir", "data.path", "data.weights", "checkpoint.init_from", "train.batch_ramp"), None),
    **dict.fromkeys(("lr.warmup_steps", "lr.decay_steps", "lr.min_lr"), None),  # derived for these steps
}


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
    asked = layout_of(Case(config, world_size))
    axes, run = _axes(config, asked)
    known = with_values(config, {"model.vocab_size": vocabulary_of(config)})
    small = with_values(known, ALWAYS | axes | _stages(config, run) | _model(known, asked, run))
    small = with_values(small, _batches(config, asked, run))
    optimizer = config.optimizer
    peak, eps, clip = min(optimizer.lr, 1e-2), max(optimizer.eps, EPS), min(optimizer.clip_grad, CLIP)
    small = with_values(small, {"optimizer.lr": peak, "optimizer.eps": eps, "optimizer.clip_grad": clip})
    problems = check(small, run.world_size)
    assert not problems, problems
    layout = layout_of(Case(small, run.world_size))
    return Shrunk(derive(small, run.world_size), layout, config, asked, tuple(_notes(config, asked, layout)))


def vocabulary_of(config: Config) -> int:
    """model.vocab_size, or what the tokenizer will say as far as its name tells."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    return VOCABULARIES.get(config.tokenizer, config.data.bpe_vocab_size if config.tokenizer == "bpe" else ASSUMED)


def _axes(config: Config, asked: ParallelLayout) -> tuple[dict[str, Any], ParallelLayout]:
    """All axes as asked, or at most 2 each."""
    axes, dp = {axis: getattr(config.parallel, axis) for axis in AXES}, asked.dp
    if asked.world_size > MOST_RANKS:
        axes = {axis: min(2, size or 1) for axis, size in axes.items()}
        small = Config(parallel=ParallelConfig(**axes))
        ranks, unit = dense_ranks(small), least_world(small)
        dp = -(-min(2, asked.dp) * ranks // unit) * unit // ranks
    run = ParallelLayout(tp=axes["tp"], cp=axes["cp"], dp=dp, pp=axes["pp"], vpp=axes["vpp"])
    return {f"parallel.{axis}": size for axis, size in axes.items()}, run


def _stages(config: Config, run: ParallelLayout) -> dict[str, Any]:
    """Layers of the model, and of each stage: with uneven and empty stages where some were.

    Equal counts stay equal, larger ones stay larger, and 0 stays 0.
    """
    counts, stages = [stage.count for stage in stage_layers(stage_settings(config))], run.pp * run.vpp
    kept = [counts[at * (len(counts) - 1) // max(1, stages - 1)] for at in range(stages)]
    small = [sorted({0, *kept}).index(count) for count in kept]
    layout: str | None = layout_text(small)
    if len(set(kept)) == 1:
        small, layout = [min(max(1, kept[0]), FEW)] * stages, None
    layers, recomputed = sum(small), config.train.recompute_layers
    if recomputed is not None:
        recomputed = layers if recomputed >= config.model.num_layers else max(1, layers // 2)
    return {
        "model.num_layers": layers,
        "parallel.pipeline_layout": layout,
        "train.recompute_layers": recomputed,
    }


def _model(config: Config, asked: ParallelLayout, run: ParallelLayout) -> dict[str, Any]:
    """Ranks share a key-value head where they did; groups of queries stay groups; the vocabulary has as much padding
    as before, and rows that split evenly over tp only if they did."""
    model = config.model
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads or 1
    head_size, ffn = model.head_size or 1, model.ffn_hidden_size or 1
    sharers = max(1, asked.tp // kv_heads)  # ranks of one key-value head
    sharers_run = min(sharers, run.tp)
    kv_heads_run = run.tp // sharers_run * max(1, min(kv_heads // asked.tp, FEW))
    heads_run = kv_heads_run * sharers_run * min(heads // kv_heads // sharers, FEW)
    all_heads, before = heads_run * min(head_size, 4 * FEW), heads * head_size
    hidden = max(1, all_heads * model.hidden_size // before)  # as wide as the heads together, or narrower
    if model.hidden_size > before:
        hidden = min(2 * all_heads, -(-all_heads * model.hidden_size // before))
    size, multiple = vocabulary_of(config), model.vocab_multiple
    count = -(-size // multiple)
    uneven = count * multiple % asked.tp != 0
    rows, unit = next(
        (few * unit, unit)
        for unit in (multiple, multiple + 1)
        for few in range(min(count, 2 * run.tp), min(count, 3 * run.tp) + 2)
        if (few * unit % run.tp != 0) == uneven
    )
    return {
        "model.hidden_size": hidden,
        "model.num_attention_heads": heads_run,
        "model.num_key_value_heads": kv_heads_run,
        "model.head_size": min(head_size, 4 * FEW),
        "model.ffn_hidden_size": run.tp * min(ffn // asked.tp, 6 * FEW),
        "model.vocab_size": rows - (count * multiple - size),
        "model.vocab_multiple": unit,
        "model.init_std": model.init_std * sqrt(model.hidden_size / hidden),  # activations keep their size
    }


def _batches(config: Config, asked: ParallelLayout, run: ParallelLayout) -> dict[str, Any]:
    """Fewer microbatches than pipeline ranks, as many or more if there were, and a multiple of the group if they were;
    a sequence, learned positions and chunks of the loss that are as long in proportion."""
    model, train, micro = config.model, config.train, config.train.micro_batch_size or 1
    group, number = config.parallel.microbatch_group_size, train.global_batch_size // (micro * asked.dp)
    microbatches = run.pp * min(number // asked.pp, FEW) + min(number % asked.pp, run.pp - 1)
    if group is not None and number % group:
        microbatches, group = 2 * run.pp + 1, run.pp + 1
    elif group is not None:
        usual = group == default_group_size(asked.pp, number)
        group = None if usual and microbatches % default_group_size(run.pp, microbatches) == 0 else microbatches
    unit = 2 * run.tp * run.cp  # context parallelism cuts twice as many pieces as it has ranks
    length = max(1, SEQ_LENGTH // unit) * unit + (train.seq_length % (asked.tp * asked.cp) > 0)
    positions, chunk, few = model.max_positions, model.loss_chunk_tokens, min(micro, FEW)
    if positions is not None and model.position == "learned":
        positions = length + min(8, positions - train.seq_length)
    if chunk is not None:
        chunk = max(1, chunk * few * length // (micro * train.seq_length))
    return {
        "train.seq_length": length,
        "train.micro_batch_size": few,
        "train.global_batch_size": few * run.dp * microbatches,
        "parallel.microbatch_group_size": group,
        "model.max_positions": positions,
        "model.loss_chunk_tokens": chunk,
    }


def _notes(config: Config, asked: ParallelLayout, run: ParallelLayout) -> Iterator[str]:
    """What is not as the user asked for, besides sizes."""
    if asked.world_size > MOST_RANKS:
        yield f"above {MOST_RANKS} ranks each axis shrinks to 2: {run.world_size} ranks run for {asked.world_size}"
    if config.train.compile:
        yield "train.compile is off: this checks the layout, not the compiler"
    if config.train.batch_ramp is not None:
        yield "train.batch_ramp is off: all batches hold as many sequences"
    if config.optimizer.eps < EPS:
        yield f"optimizer.eps is {EPS:g}: a smaller one makes steps of rounding errors"
    if config.model.vocab_size is None:
        yield f"model.vocab_size is taken as {vocabulary_of(config):,}: the tokenizer is not asked (set it to be exact)"

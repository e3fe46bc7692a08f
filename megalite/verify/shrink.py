"""Shrinks the user's config until it trains in fp64 on a CPU within seconds, and keeps every feature that it had.

What a layout can get wrong stays: which axes there are, whether sizes split evenly, whether ranks share key-value
heads, grouped queries, padding and uneven rows of the vocabulary, accumulation over microbatches, a pipeline's schedule
with more or fewer of them than ranks, uneven and empty stages, layers with and without experts, the options of routers,
recompute, clipping. Only counts shrink, each in units of its axis. No torch import.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, lcm, sqrt
from typing import Any

from megalite.config.context_rules import BLOCK
from megalite.config.derive import derive
from megalite.config.exchange import Exchange, exchange_of
from megalite.config.layout import dense_ranks, layout_of, least_world, stage_settings
from megalite.config.parallel_rules import checked_layout
from megalite.config.remedies import Case
from megalite.config.rules import check
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
    "tokenizer": "char",  # of any vocabulary: a text is made for it
    "data.source": "stdlib",
    "train.steps": 5,  # the design's equivalence test
    "checkpoint.interval": 1,
    "checkpoint.keep": 5,
    **dict.fromkeys(("train.log_interval", "train.max_bad_steps"), 1),
    **dict.fromkeys(("train.eval_interval", "train.sample_tokens", "train.sample_interval"), 0),
    **dict.fromkeys(("train.record_pipeline", "train.check_replicas_every", "log.report_interval_s"), 0),
    **dict.fromkeys(("log.tensorboard", "launch.preflight", "checkpoint.async"), False),
    "log.wandb": "disabled",
    **dict.fromkeys(("launch.status_file", "train.max_minutes", "train.sample_prompts"), None),
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
    asked, optimizer = checked_layout(Case(config, world_size)), config.optimizer
    axes, run = _axes(config, asked)
    exchange, context = _context(config, asked, run)
    numbers = {
        "lr": min(optimizer.lr, 1e-2),
        "eps": max(optimizer.eps, EPS),
        "clip_grad": min(optimizer.clip_grad, CLIP),
    }
    small = with_values(
        config, ALWAYS | {f"optimizer.{name}": value for name, value in numbers.items()} | axes | context
    )
    small = with_values(small, _stages(config, run) | _model(config, asked, run, exchange))
    small = with_values(small, _batches(config, asked, run, exchange))
    if config.model.moe.num_experts:
        small = with_values(small, _experts(config, asked, run, small.model.num_layers))
    problems = check(small, run.world_size)
    assert not problems, problems
    layout = layout_of(small, run.world_size)
    return Shrunk(derive(small, run.world_size), layout, config, asked, tuple(_notes(config, asked, layout)))


def vocabulary_of(config: Config) -> int:
    """model.vocab_size, or what the tokenizer will say as far as its name tells."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    return VOCABULARIES.get(config.tokenizer, config.data.bpe_vocab_size if config.tokenizer == "bpe" else ASSUMED)


def _few(count: int, ranks: int, ranks_run: int, most: int = FEW) -> int:
    """What is left of `count` things on `ranks`: at most `most` on each, and a rest where there was one."""
    return min(count // ranks, most) * ranks_run + min(count % ranks, ranks_run - 1)


def _axes(config: Config, asked: ParallelLayout) -> tuple[dict[str, Any], ParallelLayout]:
    """All axes as asked, or at most 2 each."""
    axes, dp = {axis: getattr(config.parallel, axis) for axis in AXES}, asked.dp
    if asked.world_size > MOST_RANKS:
        axes = {axis: size and min(2, size) for axis, size in axes.items()}
        small = Config(parallel=ParallelConfig(**axes))
        ranks, unit = dense_ranks(small), least_world(small)
        dp = -(-min(2, asked.dp) * ranks // unit) * unit // ranks
    etp = None if asked.etp is None else axes["etp"] or axes["tp"]
    run = ParallelLayout(axes["tp"], axes["cp"], dp, axes["pp"], axes["vpp"], axes["ep"], etp, asked.order)
    return {f"parallel.{axis}": size for axis, size in axes.items()}, run


def _context(config: Config, asked: ParallelLayout, run: ParallelLayout) -> tuple[Exchange, dict[str, Any]]:
    """The exchange that was asked for, on as many ranks or on the 2 that are left of them."""
    before = exchange_of(config)
    alltoall = before.alltoall if run.cp == asked.cp else min(before.alltoall, run.cp) if before.ring == 1 else 1
    exchange = replace(before, alltoall=alltoall, ring=run.cp // alltoall)
    if run.cp == 1:
        return exchange, {"parallel.cp_comm": "auto", "parallel.cp_alltoall": None}
    between = "allgather" if exchange.gathers else "ring"
    mixed = exchange.alltoall > 1 and exchange.ring > 1
    comm = "alltoall" if exchange.ring == 1 else "alltoall+ring" if mixed else between
    return exchange, {"parallel.cp_comm": comm, "parallel.cp_alltoall": exchange.alltoall if mixed else None}


def _stages(config: Config, run: ParallelLayout) -> dict[str, Any]:
    """Layers of the model, and of each stage: with uneven and empty stages where some were.

    Equal counts stay equal, larger ones stay larger, and 0 stays 0.
    """
    counts, stages = [stage.count for stage in stage_layers(stage_settings(config))], run.pp * run.vpp
    kept = [counts[at * (len(counts) - 1) // max(1, stages - 1)] for at in range(stages)]
    even, moe = len(set(kept)) == 1, config.model.moe
    most = 2 * FEW if moe.first_dense_layers or moe.layer_freq > 1 else FEW  # some with experts and some without
    small = [min(max(1, kept[0]), most)] * stages if even else [sorted({0, *kept}).index(count) for count in kept]
    layers, recomputed = sum(small), config.train.recompute_layers
    if recomputed is not None:
        recomputed = layers if recomputed >= config.model.num_layers else max(1, layers // 2)
    return {
        "model.num_layers": layers,
        "parallel.pipeline_layout": None if even else layout_text(small),
        "train.recompute_layers": recomputed,
    }


def _model(config: Config, asked: ParallelLayout, run: ParallelLayout, exchange: Exchange) -> dict[str, Any]:
    """Ranks share a key-value head where they did, and heads divide over the ranks that swap them; groups of queries
    stay groups; the width stays that of all heads, or narrower or wider; the vocabulary has as much padding as before,
    and rows as uneven over tp."""
    model = config.model
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads or 1
    head_size, ffn = model.head_size or 1, model.ffn_hidden_size or 1
    sharers = min(max(1, asked.tp // kv_heads), run.tp)  # ranks of one key-value head
    groups, queries = max(1, min(kv_heads // asked.tp, FEW)), min(heads // max(kv_heads, asked.tp), FEW)
    if max(1, kv_heads // asked.tp) % exchange.alltoall == 0:
        groups = lcm(groups, exchange.alltoall)
    else:  # ranks have copies of a group
        groups = gcd(groups, exchange.alltoall)
        queries = lcm(queries, exchange.alltoall // groups)
    kv_heads_run = run.tp // sharers * groups
    heads_run = kv_heads_run * sharers * queries
    head_size_run = min(head_size, 4 * FEW)
    before, width = heads * head_size, heads_run * head_size_run
    size, multiple = vocabulary_of(config), model.vocab_multiple
    rows = -(-size // multiple)  # in multiples
    hidden = min(2 * width, max(1, -(-width * model.hidden_size // before) - (model.hidden_size < before)))
    return {
        "model.hidden_size": hidden,
        "model.num_attention_heads": heads_run,
        "model.num_key_value_heads": kv_heads_run,
        "model.head_size": head_size_run,
        "model.ffn_hidden_size": _few(ffn, asked.tp, run.tp, 6 * FEW),
        "model.vocab_size": size - (rows - min(rows, 2 * run.tp + rows % run.tp)) * multiple,
        "model.init_std": model.init_std * sqrt(model.hidden_size / hidden),  # activations keep their size
    }


def _experts(config: Config, asked: ParallelLayout, run: ParallelLayout, layers: int) -> dict[str, Any]:
    """As many experts on each rank, or a few; a token chooses all if it did, and among all groups if it did. Layers
    without experts stay before and between those that have some, as far as `layers` allow."""
    moe, width = config.model.moe, config.model.moe.ffn_hidden_size or 1
    experts, groups, top_groups, top = moe.num_experts, moe.num_groups, moe.top_k_groups, moe.top_k
    experts_run = min(experts // run.ep, 2 * FEW) * run.ep
    if experts_run < experts:
        of_group, every = top // top_groups, top == experts
        if groups > 1:
            some = 1 < top_groups < groups and experts_run % 4 == 0
            groups, top_groups = (4, 2) if some else (2, 1 if top_groups < groups else 2)
        room = experts_run // groups
        room -= top_groups == groups and experts_run > FEW  # else a token chose all
        top = experts_run if every else top_groups * min(of_group, FEW, room)
    assert asked.etp is not None
    assert run.etp is not None
    # Shared experts are an MLP over tp.
    unit, unit_run = (lcm(of.etp or 1, of.tp if moe.num_shared_experts else 1) for of in (asked, run))
    first = min(moe.first_dense_layers, 1, layers - 1)
    return {
        "model.moe.num_experts": experts_run,
        "model.moe.num_groups": groups,
        "model.moe.top_k_groups": top_groups,
        "model.moe.top_k": top,
        "model.moe.ffn_hidden_size": min(max(1, width // unit), 6 * FEW) * unit_run,
        "model.moe.num_shared_experts": min(moe.num_shared_experts, FEW),
        "model.moe.capacity_factor": moe.capacity_factor and max(moe.capacity_factor, 1 / top),  # less is refused
        "model.moe.first_dense_layers": first,
        "model.moe.layer_freq": min(moe.layer_freq, 2, layers - first),
    }


def _batches(config: Config, asked: ParallelLayout, run: ParallelLayout, exchange: Exchange) -> dict[str, Any]:
    """Fewer microbatches than pipeline ranks, as many or more if there were, and a multiple of the group if they were;
    a sequence, learned positions and chunks of the loss that are as long in proportion."""
    model, train, micro = config.model, config.train, config.train.micro_batch_size or 1
    group, number = config.parallel.microbatch_group_size, train.global_batch_size // (micro * asked.dp)
    microbatches = _few(number, asked.pp, run.pp)
    if group is not None:
        whole = -(-microbatches // run.pp) * run.pp
        group, microbatches = (None, whole) if number % group == 0 else (run.pp + 1, 2 * run.pp + 1)
    unit = 2 * run.tp * run.cp  # context parallelism cuts twice as many pieces as it has ranks
    least = SEQ_LENGTH if exchange.ring == 1 else 2 * exchange.ring * BLOCK
    length = max(1, -(-least // unit)) * unit
    length += (train.seq_length % (asked.tp * asked.cp) > 0) * (1 if run.cp == 1 else 2 * run.cp)
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

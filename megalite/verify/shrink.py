"""Shrinks the user's config until it trains in fp64 on a CPU within seconds, and keeps every feature that it had.

What a layout can get wrong stays: which axes there are, whether sizes split evenly, whether ranks share key-value
heads, grouped queries, padding and uneven rows of the vocabulary, more or fewer microbatches than pipeline ranks,
uneven and empty stages, layers with and without experts, the options of routers, recompute. Only counts shrink, each in
units of its axis. No torch import.
"""

from dataclasses import replace
from math import gcd, lcm, sqrt
from typing import Any, NamedTuple

from megalite.config.derive import derive
from megalite.config.exchange import exchange_of
from megalite.config.layout import dense_ranks, layout_of, least_world, stage_settings
from megalite.config.parallel_rules import BLOCK
from megalite.config.rules import check
from megalite.config.schema import Config, ParallelConfig
from megalite.config.settings import with_values
from megalite.layout.ranks import ParallelLayout
from megalite.layout.stages import stage_layers

MOST_RANKS = 8  # above, every axis shrinks to 2
FEW, WIDE, LENGTH = 2, 12, 16  # things on one rank, inner width of an MLP on one rank, tokens of a sequence
EPS, CLIP = 1e-8, 0.05  # a smaller eps makes steps of rounding; small models have larger gradients than that
AXES = ("tp", "cp", "pp", "vpp", "ep", "etp")
VOCABULARIES = {"byte": 257, "char": 65}  # unless model.vocab_size is set; of other tokenizers 50,257
OFF: dict[str, Any] = {
    "device": "cpu",
    "precision": "fp64",
    "tokenizer": "char",
    "data.source": "stdlib",
    "log.wandb": "disabled",
    "train.steps": 5,
    "checkpoint.keep": 5,
    "checkpoint.interval": 1,
    "train.log_interval": 1,
    **dict.fromkeys(("train.eval_interval", "train.sample_tokens", "train.record_pipeline"), 0),
    **dict.fromkeys(("train.check_replicas_every", "log.report_interval_s"), 0),
    **dict.fromkeys(("train.compile", "launch.preflight", "log.tensorboard", "checkpoint.async"), False),
    **dict.fromkeys(("parallel.standalone_embedding", "parallel.count_embedding", "parallel.count_loss"), False),
    **dict.fromkeys(("parallel.first_stage_layers", "parallel.last_stage_layers", "parallel.nccl_options"), None),
    **dict.fromkeys(("run_dir", "data.path", "data.weights", "checkpoint.init_from", "train.batch_ramp"), None),
    **dict.fromkeys(("lr.warmup_steps", "lr.decay_steps", "lr.min_lr", "launch.status_file"), None),
    **dict.fromkeys(("train.max_minutes", "train.sample_prompts"), None),
    "train.skip_steps": [],
    "train.profile_steps": [],
}


class Shrunk(NamedTuple):
    """`config` runs on `layout`, and `reference` is the same training on one process."""

    config: Config
    layout: ParallelLayout
    reference: Config


def shrink(config: Config, world_size: int) -> Shrunk:
    """`config` is checked and derived for `world_size` ranks; so is the small one."""
    asked, optimizer = layout_of(config, world_size), config.optimizer
    run = _smaller(config, asked)
    values = OFF | {f"parallel.{axis}": getattr(run, axis) for axis in AXES}
    values |= {"optimizer.lr": min(optimizer.lr, 1e-2), "optimizer.eps": max(optimizer.eps, EPS)}
    values |= {"optimizer.clip_grad": min(optimizer.clip_grad, CLIP)}
    values |= _stages(config, run) | _model(config, asked, run) | _batches(config, asked, run)
    if config.model.moe.num_experts:
        values |= _experts(config, asked, run, values["model.num_layers"])
    problems = check(small := with_values(config, values), run.world_size)
    assert not problems, problems
    alone = replace(small, parallel=ParallelConfig(), optimizer=replace(small.optimizer, instances=1))
    return Shrunk(derive(small, run.world_size), run, derive(alone))


def vocabulary_of(config: Config) -> int:
    """model.vocab_size, or what the tokenizer will say as far as its name tells."""
    tokens = config.data.bpe_vocab_size if config.tokenizer == "bpe" else 50257
    return config.model.vocab_size or VOCABULARIES.get(config.tokenizer, tokens)


def _smaller(config: Config, asked: ParallelLayout) -> ParallelLayout:
    """All axes as asked, or at most 2 each."""
    if asked.world_size <= MOST_RANKS:
        return asked
    axes: dict[str, Any] = {axis: min(2, getattr(asked, axis) or 1) for axis in AXES}
    small = Config(parallel=ParallelConfig(**axes))
    ranks, unit = dense_ranks(small), least_world(small) if asked.has_experts else 1
    dp = -(-min(2, asked.dp) * ranks // unit) * unit // ranks
    return replace(asked, **{**axes, "etp": axes["etp"] if asked.has_experts else None}, dp=dp)


def _stages(config: Config, run: ParallelLayout) -> dict[str, Any]:
    """Layers of each stage: equal counts stay equal, larger ones stay larger, and 0 stays 0."""
    counts, stages = [stage.count for stage in stage_layers(stage_settings(config))], run.pp * run.vpp
    kept = [counts[at * (len(counts) - 1) // max(1, stages - 1)] for at in range(stages)]
    even, moe = len(set(kept)) == 1, config.model.moe
    most = 2 * FEW if moe.first_dense_layers or moe.layer_freq > 1 else FEW  # some with experts and some without
    small = [min(max(1, kept[0]), most)] * stages if even else [sorted({0, *kept}).index(count) for count in kept]
    recomputed = config.train.recompute_layers and max(1, sum(small) // 2)
    layout = None if even else f"E{'|'.join('t' * count for count in small)}L"
    return {"model.num_layers": sum(small), "parallel.pipeline_layout": layout, "train.recompute_layers": recomputed}


def _model(config: Config, asked: ParallelLayout, run: ParallelLayout) -> dict[str, Any]:
    """Ranks share a key-value head where they did, and heads divide over the ranks that swap them; groups of queries
    stay groups; the width stays that of all heads, or narrower or wider; the vocabulary has as much padding as before,
    and rows as uneven over tp."""
    model, exchange = config.model, exchange_of(config)
    heads, kv_heads, head_size = model.num_attention_heads, model.num_key_value_heads, model.head_size
    groups, queries = max(1, min(kv_heads // asked.tp, FEW)), min(heads // max(kv_heads, asked.tp), FEW)
    swaps = min(exchange.alltoall, run.cp)
    if max(1, kv_heads // asked.tp) % exchange.alltoall == 0:
        groups = lcm(groups, swaps)
    else:  # ranks have copies of a group
        queries = lcm(queries, swaps // gcd(groups, swaps))
        groups = gcd(groups, swaps)
    kv_heads_run = run.tp // min(max(1, asked.tp // kv_heads), run.tp) * groups
    heads_run = kv_heads_run * min(max(1, asked.tp // kv_heads), run.tp) * queries
    width, head_size_run = heads_run * min(head_size, 8), min(head_size, 8)
    wider = model.hidden_size - heads * head_size
    hidden = 2 * width if wider > 0 else width // 2 if wider < 0 else width
    size, multiple = vocabulary_of(config), model.vocab_multiple
    rows = -(-size // multiple)  # in multiples
    between = "allgather" if exchange.gathers else "ring"
    mixed = exchange.ring > 1 and 1 < exchange.alltoall < run.cp
    comm = "alltoall+ring" if mixed else "alltoall" if exchange.ring == 1 else between
    return {
        "model.hidden_size": hidden,
        "model.num_attention_heads": heads_run,
        "model.num_key_value_heads": kv_heads_run,
        "model.head_size": head_size_run,
        "model.ffn_hidden_size": min(model.ffn_hidden_size // asked.tp, WIDE) * run.tp,
        "model.vocab_size": size - (rows - min(rows, 2 * run.tp + rows % run.tp)) * multiple,
        "model.init_std": model.init_std * sqrt(model.hidden_size / hidden),  # activations keep their size
        "parallel.cp_comm": comm if run.cp > 1 else "auto",
        "parallel.cp_alltoall": exchange.alltoall if mixed else None,
    }


def _experts(config: Config, asked: ParallelLayout, run: ParallelLayout, layers: int) -> dict[str, Any]:
    """The same number of experts on each rank, or a few; a token chooses all if it did, and among all groups if it did.
    Layers without experts stay before and between those that have some, as far as `layers` allow."""
    moe, experts = config.model.moe, min(config.model.moe.num_experts // run.ep, 2 * FEW) * run.ep
    groups, top_groups, top = moe.num_groups, moe.top_k_groups, moe.top_k
    if experts < moe.num_experts:
        if groups > 1:
            groups, top_groups = 2, 1 if top_groups < groups else 2
        room = experts // groups - (top_groups == groups and experts > FEW)  # else a token chose all
        top = experts if top == moe.num_experts else top_groups * min(top // moe.top_k_groups, FEW, room)
    # Shared experts are an MLP over tp.
    unit, unit_run = (lcm(of.etp or 1, of.tp if moe.num_shared_experts else 1) for of in (asked, run))
    first = min(moe.first_dense_layers, 1, layers - 1)
    values = {
        "num_experts": experts,
        "num_groups": groups,
        "top_k_groups": top_groups,
        "top_k": top,
        "ffn_hidden_size": min(max(1, moe.ffn_hidden_size // unit), WIDE) * unit_run,
        "num_shared_experts": min(moe.num_shared_experts, FEW),
        "capacity_factor": moe.capacity_factor and max(moe.capacity_factor, 1 / top),  # less is refused
        "first_dense_layers": first,
        "layer_freq": min(moe.layer_freq, 2, layers - first),
    }
    return {f"model.moe.{name}": value for name, value in values.items()}


def _batches(config: Config, asked: ParallelLayout, run: ParallelLayout) -> dict[str, Any]:
    """Fewer microbatches than pipeline ranks, as many or more if there were, and a multiple of the group if they were;
    a sequence that divides if it did, and chunks of the loss where there were any."""
    train, group = config.train, config.parallel.microbatch_group_size
    micro, ring = min(train.micro_batch_size, FEW), exchange_of(config).ring
    number = train.global_batch_size // (train.micro_batch_size * asked.dp)
    microbatches = min(number // asked.pp, FEW) * run.pp + min(number % asked.pp, run.pp - 1)
    if group is not None:
        whole = -(-microbatches // run.pp) * run.pp
        group, microbatches = (None, whole) if number % group == 0 else (run.pp + 1, 2 * run.pp + 1)
    unit = 2 * run.tp * run.cp  # context parallelism cuts twice as many pieces as it has ranks
    length = -(-(LENGTH if ring == 1 else 2 * run.cp * BLOCK) // unit) * unit
    length += (train.seq_length % (asked.tp * asked.cp) > 0) * (1 if run.cp == 1 else 2 * run.cp)
    return {
        "train.seq_length": length,
        "train.micro_batch_size": micro,
        "train.global_batch_size": micro * run.dp * microbatches,
        "parallel.microbatch_group_size": group,
        "model.max_positions": None,
        "model.loss_chunk_tokens": config.model.loss_chunk_tokens and length // 2,
    }

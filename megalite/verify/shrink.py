"""Shrinks the user's config until it trains in fp64 on a CPU within seconds, and keeps every feature that it had.

What a layout can get wrong stays: its axes, sizes that split unevenly, shared key-value heads, padding and uneven rows
of the vocabulary, few or many microbatches, uneven and empty stages, experts, recompute. Counts shrink, in units of
their axes. No torch import.
"""

from contextlib import suppress
from dataclasses import replace
from math import gcd, lcm, sqrt
from typing import Any

from megalite.config.arguments import read_arguments
from megalite.config.compose import load_config, read_settings
from megalite.config.derive import derive
from megalite.config.layout import dense_ranks, exchange_of, layout_of, least_world, stage_settings
from megalite.config.rules import BLOCK, check
from megalite.config.schema import Config, ParallelConfig
from megalite.config.settings import SETTINGS, value_of, with_values
from megalite.errors.problems import UserError
from megalite.layout.ranks import ParallelLayout
from megalite.layout.stages import stage_layers
from megalite.optim.groups import parameters_of_groups, with_known_groups

MOST_RANKS = 8  # above, every axis shrinks to its least factor
FEW, WIDE, LENGTH = 2, 12, 16  # things on one rank, inner width of an MLP on one rank, tokens of a sequence
AXES = ("tp", "cp", "pp", "vpp", "ep", "etp")
VOCABULARIES = {"byte": 257, "char": 65}  # unless model.vocab_size is set; of other tokenizers 50,257
KEPT = (  # settings as the user has them, beside those of the model and the optimizer
    *("seed", "lr.schedule", "lr.table", "data.cross_document_attention", "data.mask_end_of_document"),
    *(f"parallel.{name}" for name in ("order", "schedule", "sequence_parallel", "cp_comm", "cp_alltoall")),
    *(f"train.{name}" for name in ("label_smoothing", "z_loss", "recompute", "recompute_modules")),
)
FIXED: dict[str, Any] = {
    "device": "cpu",
    "precision": "fp64",
    "tokenizer": "char",
    "model.max_positions": None,
    "train.steps": 5,
    "train.compile": False,
    "checkpoint.interval": 1,
    "checkpoint.keep": 5,
    "log.wandb": "disabled",
    "log.report_interval_s": 0.0,
    **{f"train.{name}": 0 for name in ("eval_interval", "check_replicas_every", "sample_tokens")},
    "optimizer.muon.dtype": None,
    **{f"optimizer.{name}_dtype": "fp32" for name in ("gradient", "communication", "moment")},  # here they are fp64
}
LEAST_EPS = 1e-8  # a smaller one makes steps of rounding
MOST = {"optimizer.lr": 1e-2, "optimizer.clip_grad": 0.05}  # small models have larger gradients


def load(argv: list[str], world_size: int | None, dp: int | None) -> tuple[Config, int]:
    """The config of the launcher's overrides and the size of the world; UserError with all that is wrong.

    The world is `world_size`, or `dp` times the ranks that the layout needs: by default 2 times, so that data
    parallelism is verified as well, where that is at most 8 ranks and is not refused.
    """
    axes, *_ = read_settings(read_arguments(argv))  # load_config tells what is wrong in them
    world = world_size or (least_world(axes) if dp is None else dp * dense_ranks(axes))
    if world_size is None and dp is None and 2 * world <= MOST_RANKS:
        with suppress(UserError):
            return with_known_groups(load_config(argv, 2 * world)), 2 * world
    try:
        return with_known_groups(load_config(argv, world)), world
    except UserError:
        if world_size is None:  # it follows the sizes: what is wrong in a world that all of them divide?
            roomy = lcm(world, *range(1, 13))
            load_config([*argv, f"train.global_batch_size={roomy}", "train.micro_batch_size=1"], roomy)
        raise


def shrink(config: Config, world_size: int) -> tuple[Config, ParallelLayout, Config]:
    """The small config, the layout that it runs on, and the same training on one process. `config` is checked and
    derived for `world_size` ranks; so is the small one."""
    asked = layout_of(config, world_size)
    run = _smaller(config, asked)
    kept = [name for name in SETTINGS if name in KEPT or name.startswith(("model.", "optimizer."))]
    values = {name: value_of(config, name) for name in kept} | FIXED
    values |= {name: min(values[name], most) for name, most in MOST.items()}
    values |= {"optimizer.eps": max(config.optimizer.eps, LEAST_EPS)}
    values |= {"optimizer.instances": gcd(config.optimizer.instances, run.dp * run.cp)}
    values |= {f"parallel.{axis}": getattr(run, axis) for axis in AXES}
    values |= _stages(config, run) | _model(config, asked, run) | _batches(config, asked, run)
    shrunk = derive(with_values(Config(), values), run.world_size)
    pairs = zip(config.optimizer.groups, parameters_of_groups(shrunk), strict=True)
    matching = [group for group, records in pairs if records]
    small = with_values(Config(), values | {"optimizer.groups": matching})  # others are of layers that are left out
    problems = check(small, run.world_size)
    assert not problems, problems
    alone = replace(small, parallel=ParallelConfig(), optimizer=replace(small.optimizer, instances=1))
    return derive(small, run.world_size), run, derive(alone)


def vocabulary_of(config: Config) -> int:
    """model.vocab_size, or what the tokenizer will say as far as its name tells."""
    tokens = config.data.bpe_vocab_size if config.tokenizer == "bpe" else 50257
    return config.model.vocab_size or VOCABULARIES.get(config.tokenizer, tokens)


def _smaller(config: Config, asked: ParallelLayout) -> ParallelLayout:
    """All axes as asked, or their least factors, by which sizes of the model still divide; at most 2 of other axes."""
    if asked.world_size <= MOST_RANKS:
        return asked
    axes: dict[str, Any] = {axis: min(2, getattr(asked, axis)) for axis in ("pp", "vpp")}
    for axis in ("tp", "cp", "ep", "etp"):
        size = getattr(asked, axis) or 1
        axes[axis] = next((factor for factor in range(2, size) if size % factor == 0), size)
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
    dense = min(moe.first_dense_layers, 1, sum(small) - 1)
    return {
        "model.num_layers": sum(small),
        "model.mup_base_layers": config.model.mup_base_layers and 2 * sum(small),
        "model.moe.first_dense_layers": dense,
        "model.moe.layer_freq": min(moe.layer_freq, 2, sum(small) - dense),
        "parallel.pipeline_layout": None if even else f"E{'|'.join('t' * count for count in small)}L",
        "train.recompute_layers": config.train.recompute_layers and max(1, sum(small) // 2),
    }


def _model(config: Config, asked: ParallelLayout, run: ParallelLayout) -> dict[str, Any]:
    """Heads and experts stay, and ranks share a key-value head where they did; the width stays that of all heads, or
    narrower or wider; the vocabulary has as much padding as before, and rows as uneven over tp."""
    model, exchange, experts = config.model, exchange_of(config), config.model.moe.ffn_hidden_size
    width, head_size = model.num_attention_heads * min(model.head_size, 8), min(model.head_size, 8)
    wider = model.hidden_size - model.num_attention_heads * model.head_size
    hidden = 2 * width if wider > 0 else width // 2 if wider < 0 else width
    size, multiple = vocabulary_of(config), model.vocab_multiple
    rows = -(-size // multiple)  # in multiples
    comm = "alltoall" if exchange.ring == 1 else "allgather" if exchange.gathers else "ring"
    return {
        **({} if run.cp == asked.cp else {"parallel.cp_comm": comm, "parallel.cp_alltoall": None}),
        "model.hidden_size": hidden,
        "model.num_key_value_heads": 1 if run.tp < asked.tp > model.num_key_value_heads else model.num_key_value_heads,
        "model.head_size": head_size,
        "model.ffn_hidden_size": min(model.ffn_hidden_size, WIDE * run.tp),
        "model.moe.ffn_hidden_size": experts and min(experts, WIDE * lcm(run.tp, run.etp or 1)),
        "model.vocab_size": size - (rows - min(rows, 2 * run.tp + rows % run.tp)) * multiple,
        "model.mup_base_width": model.mup_base_width and 2 * hidden,  # as any other factor would
        "model.init_std": model.init_std * sqrt(model.hidden_size / hidden),  # activations keep their size
    }


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
        "model.loss_chunk_tokens": config.model.loss_chunk_tokens and length // 2,
    }

"""Tells whether a layout trains like one process: the user's config, made small, trained on real ranks and on one.

Both runs are real ones, in fp64 (running.py), and what they have written is compared (compare.py). The user's data is
not read, and nothing stays. No torch import before the config is accepted.
"""

import tempfile
from contextlib import suppress
from math import lcm
from pathlib import Path

from megalite.config.compose import load_config, load_values
from megalite.config.layout import dense_ranks, layout_of, least_world, stage_settings
from megalite.config.schema import Config
from megalite.errors.problems import Problem, UserError
from megalite.layout.ranks import ParallelLayout
from megalite.layout.stages import stage_layers
from megalite.layout.summary import header_lines
from megalite.verify.running import LAYOUT, SINGLE, TrainRank, train_both
from megalite.verify.shrink import AXES, MOST_RANKS, shrink, vocabulary_of


def verify(
    config: Config, world_size: int, train: TrainRank, timeout_s: float, train_layout: TrainRank | None = None
) -> tuple[list[str], bool]:
    """The lines that a user reads, and whether all is equal. `config` is derived and checked for `world_size` ranks.

    `train` trains one rank as users do, `train_layout` (for tests) a rank of the layout. A process that fails or hangs
    raises RunFailure.
    """
    small, layout, reference = shrink(config, world_size)
    asked = _described(config, layout_of(config, world_size))
    size = f"{small.train.steps} steps of {small.train.global_batch_size} x {small.train.seq_length} tokens"
    lines = [
        f"asked   {asked}",
        f"run     {_described(small, layout)}",
        f"        {size}, fp64 on the CPU, random text",
    ]
    if config.train.compile:
        lines.append("note    train.compile is off: this checks the layout, not the compiler")
    if config.model.vocab_size is None:
        lines.append("note    the tokenizer is not asked for its vocabulary (model.vocab_size=N to be exact)")
    with tempfile.TemporaryDirectory(prefix="megalite-verify-") as name:
        folder, ranks = Path(name), layout.world_size
        train_both(small, ranks, reference, folder, timeout_s, (train_layout or train, train))
        from megalite.verify.compare import compare, table  # torch: from here on it takes seconds

        rows = compare(folder / LAYOUT, folder / SINGLE, small.optimizer)
    return [*lines, "", *table(rows, ranks)], all(row.passed for row in rows)


def load(argv: list[str], world_size: int | None, dp: int | None) -> tuple[Config, int]:
    """The config of the launcher's overrides and the world that it is verified on; UserError with all that is wrong.

    The world is `world_size`, or `dp` times the ranks that the layout needs: by default 2 times, so that data
    parallelism is verified along with the axes that were asked for, where that is at most 8 ranks and is not refused.
    """
    if world_size is not None and dp is not None:
        raise UserError(Problem("--dp", dp, f"follows from --world-size {world_size}", "give one of the two"))
    world = world_size or 1
    with suppress(UserError):  # which load_config then tells
        axes = load_values(argv, [f"parallel.{axis}" for axis in AXES])
        world = world_size or (least_world(axes) if dp is None else dp * dense_ranks(axes))
    if world_size is None and dp is None and 2 * world <= MOST_RANKS:
        with suppress(UserError):
            return load_config(argv, 2 * world), 2 * world
    try:
        config = load_config(argv, world)
    except UserError:
        if world_size is None:  # it follows the sizes: what is wrong in a world that all of them divide?
            roomy = lcm(world, *range(1, 13))
            load_config([*argv, f"train.global_batch_size={roomy}", "train.micro_batch_size=1"], roomy)
        raise
    if world == 1:
        rule, remedy = "one process is what layouts are compared to", "--dp 2, or parallel.tp=2 with a batch to suit"
        raise UserError(Problem("world size", 1, rule, remedy))
    return config, world


def _described(config: Config, layout: ParallelLayout) -> str:
    """The layout and the model, in a line."""
    model, moe = config.model, config.model.moe
    heads = f"{model.num_attention_heads} heads over {model.num_key_value_heads} of {model.head_size}"
    shape = f"{model.num_layers} layers x {model.hidden_size}, {heads}, ffn {model.ffn_hidden_size}"
    experts = f", {moe.num_experts} experts (top {moe.top_k})" if moe.num_experts else ""
    counts = ", ".join(str(stage.count) for stage in stage_layers(stage_settings(config)))
    stages = f", stages of {counts} layers" if layout.pp > 1 else ""
    return f"{header_lines(layout)[0]}; {shape}{experts}{stages}, vocabulary {vocabulary_of(config):,}"

"""Tells whether a layout trains like one process: the user's config, made small, trained on real ranks and on one.

Both runs are real ones, in fp64 (running.py), and what they have written is compared (compare.py). The user's data is
not read, and nothing stays. No torch import before the config is accepted.
"""

import tempfile
import textwrap
from contextlib import suppress
from math import lcm
from pathlib import Path

from megalite.config.compose import load_config, load_values
from megalite.config.layout import dense_ranks, layout_of, least_world
from megalite.config.schema import Config
from megalite.config.settings import value_of
from megalite.errors.problems import Problem, UserError
from megalite.layout.ranks import header_lines
from megalite.verify.running import LAYOUT, SINGLE, TrainRank, train_both
from megalite.verify.shrink import AXES, MOST_RANKS, shrink

SHOWN = (
    *(f"model.{name}" for name in ("num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")),
    *("model.vocab_size", "model.moe.num_experts", "train.seq_length", "train.global_batch_size", "train.compile"),
    "parallel.pipeline_layout",
)


def verify(
    config: Config, world_size: int, train: TrainRank, timeout_s: float, train_layout: TrainRank | None = None
) -> tuple[list[str], bool]:
    """The lines that a user reads, and whether all is equal. `config` is derived and checked for `world_size` ranks.

    `train` trains one rank as users do, `train_layout` (for tests) a rank of the layout. A process that fails or hangs
    raises RunFailure.
    """
    small, layout, reference = shrink(config, world_size)
    changed = [f"{name}={value_of(small, name)}" for name in SHOWN if value_of(small, name) != value_of(config, name)]
    lines = [f"asked   {header_lines(layout_of(config, world_size))[0]}; model={config.model.name}"]
    lines += [f"run     {header_lines(layout)[0]}; in fp64 on the CPU, on random text, with"]
    lines += textwrap.wrap(" ".join(changed), 110, initial_indent=" " * 8, subsequent_indent=" " * 8)
    with tempfile.TemporaryDirectory(prefix="megalite-verify-") as name:
        folder, ranks = Path(name), layout.world_size
        train_both(small, ranks, reference, folder, timeout_s, (train_layout or train, train))
        from megalite.verify.compare import compare, table  # torch: from here on it takes seconds

        rows = compare(folder / LAYOUT, folder / SINGLE, small.optimizer)
    return [*lines, "", *table(rows, ranks)], all(row.passed for row in rows)


def load(argv: list[str], world_size: int | None, dp: int | None) -> tuple[Config, int]:
    """The config of the launcher's overrides and the world that it is verified on; UserError with all that is wrong.

    The world is `world_size`, or `dp` (where there is no world size) times the ranks that the layout needs: by default
    2 times, so that data parallelism is verified along with the axes that were asked for, where that is at most 8 ranks
    and is not refused.
    """
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

"""Tells whether a layout trains like one process: the user's config, made small, trained on real ranks and on one.

Both runs are real ones, in fp64 (running.py), and what they have written is compared (compare.py): every loss and
gradient norm, the gradients of the first step and the parameters after the last one, within 1e-10 relative. The user's
data is not read, and nothing stays. No torch import before the config is accepted.
"""

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.config.compose import load_config, load_values
from megalite.config.exchange import exchange_of
from megalite.config.layout import dense_ranks, least_world, stage_settings
from megalite.config.schema import Config
from megalite.errors.problems import Problem, UserError
from megalite.errors.words import several
from megalite.layout.ranks import ParallelLayout
from megalite.layout.stages import stage_layers
from megalite.verify.running import LAYOUT, SINGLE, TrainRank, train_both
from megalite.verify.shrink import AXES, MOST_RANKS, Shrunk, shrink, vocabulary_of

if TYPE_CHECKING:
    from megalite.verify.compare import Row

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Verdict:
    """Every kind of number that was compared."""

    shrunk: Shrunk
    rows: "list[Row]"

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


def verify(
    config: Config, world_size: int, train: TrainRank, timeout_s: float, train_layout: TrainRank | None = None
) -> Verdict:
    """`config` is derived and checked for `world_size` ranks. A process that fails or hangs raises RunFailure.

    `train` trains one rank as users do, `train_layout` (for tests) a rank of the layout.
    """
    shrunk = shrink(config, world_size)
    with tempfile.TemporaryDirectory(prefix="megalite-verify-") as name:
        folder, ranks = Path(name), shrunk.layout.world_size
        train_both(shrunk.config, ranks, shrunk.reference, folder, timeout_s, (train_layout or train, train))
        from megalite.verify.compare import compare  # torch: from here on it takes seconds

        return Verdict(shrunk, compare(folder / LAYOUT, folder / SINGLE, shrunk.config.optimizer))


def load(argv: list[str], world_size: int | None, dp: int | None) -> tuple[Config, int]:
    """The config of the launcher's overrides and the world that it is verified on; UserError with all that is wrong.

    The world is `world_size`, or `dp` times the ranks that the layout needs: by default 2 times, so that data
    parallelism is verified along with the axes that were asked for, where that is at most 8 ranks and is not refused.
    """
    problems = [
        Problem(name, value, "must be at least 1", f"{name} 2, or leave it out")
        for name, value in (("--world-size", world_size), ("--dp", dp))
        if value is not None and value < 1
    ]
    if world_size is not None and dp is not None:
        problems.append(Problem("--dp", dp, f"follows from --world-size {world_size}", "give one of the two"))
    if problems:
        raise UserError(problems)
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


def table(verdict: Verdict) -> Iterator[str]:
    """The lines that a user reads."""
    from megalite.verify.compare import ABSOLUTE, RELATIVE

    shrunk, train = verdict.shrunk, verdict.shrunk.config.train
    yield f"asked   {_layout(shrunk.asked, shrunk.asked_layout)}: {_model(shrunk.asked)}"
    yield f"run     {_layout(shrunk.config, shrunk.layout)}: {_model(shrunk.config)}"
    if shrunk.layout.pp > 1:
        yield f"        {_pipeline(shrunk.config, shrunk.layout)}"
    size = f"{several(train.steps, 'step')} of {train.global_batch_size} x {train.seq_length} tokens"
    yield f"        {size}, fp64 on the CPU, synthetic tokens"
    yield from (f"note    {note}" for note in shrunk.notes)
    yield ""
    lines: list[tuple[str, ...]] = [("", "one process", "difference", "relative", "", "worst at")]
    for row in verdict.rows:
        figures = (f"{row.scale:.6g}", f"{row.difference:.1e}", f"{row.relative:.1e}")
        lines.append((row.what, *figures, "pass" if row.passed else "FAIL", row.where))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for what, *numbers, where in lines:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:-1], strict=True)]
        yield "  ".join([what.ljust(widths[0]), *cells, where]).rstrip()
    yield ""
    bound, failed = f"{RELATIVE:g} relative or {ABSOLUTE:g} absolute", sum(not row.passed for row in verdict.rows)
    if failed:
        yield f"FAIL: {failed} of {len(verdict.rows)} rows differ from one process by more than {bound}"
    else:
        yield f"PASS: {shrunk.layout.world_size} ranks train like one process, within {bound}"


def _layout(config: Config, layout: ParallelLayout) -> str:
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp")}
    named = [f"{axis} {size}" for axis, size in sizes.items() if size is not None and (size > 1 or axis == "etp")]
    if layout.tp > 1:
        named.insert(1, f"sequence parallel {'on' if config.parallel.sequence_parallel else 'off'}")
    if layout.cp > 1:
        named.insert(named.index(f"cp {layout.cp}") + 1, exchange_of(config).name)
    return f"{layout.world_size} ranks ({', '.join(named)})"


def _model(config: Config) -> str:
    model = config.model
    shape = f"{model.num_layers} layers x {model.hidden_size}, {model.num_attention_heads} heads of {model.head_size}"
    if model.num_key_value_heads != model.num_attention_heads:
        shape += f", {model.num_key_value_heads} key-value heads"
    shape += f", ffn {model.ffn_hidden_size}"
    if (moe := model.moe).num_experts:
        shape += f", {moe.num_experts} experts of {moe.ffn_hidden_size} (top {moe.top_k})"
    return f"{shape}, vocabulary {vocabulary_of(config):,}"


def _pipeline(config: Config, layout: ParallelLayout) -> str:
    train, stages = config.train, [str(stage.count) for stage in stage_layers(stage_settings(config))]
    microbatches = train.global_batch_size // ((train.micro_batch_size or 1) * layout.dp)
    group = config.parallel.microbatch_group_size
    grouped = "" if group is None else f" in groups of {group}"
    passes = f"{several(microbatches, 'microbatch')}{grouped}"
    return f"{config.parallel.schedule}, {passes}, stages of {', '.join(stages)} layers"

"""Tells whether a layout trains like one process: the user's config, made small, on real ranks and on one, in fp64.

The verdict is the design's: every loss, gradient norm, gradient and parameter within 1e-10 relative, 1e-12 absolute.
Nothing of the user's is read or written but the config. No torch import: the processes have it (processes.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

from megalite.config.compose import load_config
from megalite.config.parallel_rules import layout_request, stage_settings
from megalite.config.part import load_values
from megalite.config.schema import Config
from megalite.errors.problems import Problem, UserError
from megalite.layout.ranks import ParallelLayout
from megalite.layout.stages import stage_layers
from megalite.verify.compare import ABSOLUTE, RELATIVE, Row, compare
from megalite.verify.processes import TrainRank, run_processes
from megalite.verify.shrink import AXES, MOST_RANKS, Shrunk, shrink, vocabulary_of

TIMEOUT_S = 300.0
READ = (*(f"parallel.{axis}" for axis in AXES), "train.global_batch_size", "train.micro_batch_size")


@dataclass(frozen=True)
class Verdict:
    """Every kind of number that was compared."""

    shrunk: Shrunk
    rows: list[Row]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


def verify(config: Config, world_size: int, *, timeout_s: float = TIMEOUT_S, train: TrainRank | None = None) -> Verdict:
    """`config` is derived and checked for `world_size` ranks. A rank that fails or hangs raises RankFailure.

    `train` is what a rank runs in place of the real steps.
    """
    shrunk = shrink(config, world_size)
    traces, reference = run_processes(
        shrunk.config, shrunk.layout.world_size, shrunk.reference, timeout_s=timeout_s, train=train
    )
    return Verdict(shrunk, compare(traces, reference))


def load(argv: list[str], world_size: int | None, dp: int | None) -> tuple[Config, int]:
    """The config of the launcher's overrides and the world that it is verified on; UserError with all that is wrong.

    The world is `world_size`; else `dp` times what the layout needs, by default 2 times where that is at most 8 ranks
    and the batch splits, so that data parallelism is verified along with the axes that were asked for.
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
    if world_size is None:
        world_size = _natural_world(argv, dp)
        try:
            config = load_config(argv, world_size)
        except UserError as error:  # the world was ours: it is the other mistakes that count
            problems = [p for p in error.problems if p.setting != "world size"] or error.problems
            raise UserError(_advised_for_any_world(problems, argv, world_size)) from None
    else:
        config = load_config(argv, world_size)
    if world_size == 1:
        rule = "one process is what layouts are compared to"
        raise UserError(
            Problem("world size", 1, rule, "--dp 2, or parallel.tp=2 with a train.global_batch_size to suit")
        )
    return config, world_size


def _advised_for_any_world(problems: list[Problem], argv: list[str], world_size: int) -> list[Problem]:
    """The same, but with every size of parallel.tp that the model allows: the world will follow it."""
    roomy = world_size * lcm(*range(1, 17))
    try:
        load_config(argv, roomy * (roomy + 1))  # too many copies for any batch, so the batch rules none of them out
    except UserError as error:
        remedies = {(p.setting, p.rule): p.remedy for p in error.problems if "parallel.tp=" in p.rule}
        return [replace(p, remedy=remedies.get((p.setting, p.rule), p.remedy)) for p in problems]
    return problems


def _natural_world(argv: list[str], dp: int | None) -> int:
    """Ranks of `dp` copies of the model; 1 where the overrides are wrong, which load_config then says."""
    try:
        config = load_values(argv, READ)
    except UserError:
        return 1
    request, train = layout_request(config, 1), config.train
    if dp is not None:
        return dp * request.dense_product
    unit = lcm(request.dense_product, request.expert_product)
    copies = unit // request.dense_product
    batch = train.global_batch_size // (train.micro_batch_size or 1)
    enough = config.parallel.vpp == 1 or batch // (2 * copies) >= config.parallel.pp  # microbatches for interleaved
    return 2 * unit if 2 * unit <= MOST_RANKS and batch % (2 * copies) == 0 and enough else unit


def table(verdict: Verdict) -> Iterator[str]:
    """The lines that a user reads."""
    shrunk = verdict.shrunk
    yield f"asked   {_layout(shrunk.asked, shrunk.asked_layout)}: {_model(shrunk.asked)}"
    yield f"run     {_layout(shrunk.config, shrunk.layout)}: {_model(shrunk.config)}"
    if shrunk.layout.pp > 1:
        yield f"        {_pipeline(shrunk.config, shrunk.layout)}"
    yield f"        {_training(shrunk.config)}, fp64 on the CPU, synthetic tokens"
    yield from (f"note    {note}" for note in shrunk.notes)
    yield ""
    heads = ("", "one process", "difference", "relative", "", "worst at")
    lines = [heads, *(_cells(row) for row in verdict.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells in lines:
        what, *numbers, where = cells
        figures = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=False)]
        yield "  ".join([what.ljust(widths[0]), *figures, where]).rstrip()
    yield ""
    bound = f"{RELATIVE:g} relative or {ABSOLUTE:g} absolute"
    failed = [row for row in verdict.rows if not row.passed]
    if failed:
        yield f"FAIL: {len(failed)} of {len(verdict.rows)} rows differ from one process by more than {bound}"
    else:
        yield f"PASS: {shrunk.layout.world_size} ranks train like one process, within {bound}"


def _cells(row: Row) -> Sequence[str]:
    figures = (f"{row.scale:.6g}", f"{row.difference:.1e}", f"{row.relative:.1e}")
    return (row.what, *figures, "pass" if row.passed else "FAIL", row.where)


def _layout(config: Config, layout: ParallelLayout) -> str:
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp")}
    named = [f"{axis} {size}" for axis, size in sizes.items() if size is not None and size > 1]
    if layout.tp > 1:
        named.insert(1, f"sequence parallel {'on' if config.parallel.sequence_parallel else 'off'}")
    return f"{layout.world_size} ranks ({', '.join(named)})"


def _model(config: Config) -> str:
    model = config.model
    shape = f"{model.num_layers} layers x {model.hidden_size}, {model.num_attention_heads} heads of {model.head_size}"
    groups = f", {model.num_key_value_heads} key-value heads"
    grouped = groups if model.num_key_value_heads != model.num_attention_heads else ""
    return f"{shape}{grouped}, ffn {model.ffn_hidden_size}, vocabulary {vocabulary_of(config):,}"


def _pipeline(config: Config, layout: ParallelLayout) -> str:
    train, stages = config.train, [str(stage.count) for stage in stage_layers(stage_settings(config))]
    assert train.micro_batch_size is not None
    microbatches = train.global_batch_size // (train.micro_batch_size * layout.dp)
    groups = config.parallel.microbatch_group_size
    grouped = "" if groups is None else f" in groups of {groups}"
    return f"{config.parallel.schedule}, {microbatches} microbatches{grouped}, stages of {', '.join(stages)} layers"


def _training(config: Config) -> str:
    train, data = config.train, config.data
    parts = [f"{train.steps} steps of {train.global_batch_size} x {train.seq_length} tokens"]
    parts += [f"recompute {train.recompute}"] if train.recompute != "none" else []
    parts += [f"label smoothing {train.label_smoothing:g}"] if train.label_smoothing else []
    parts += [f"z-loss {train.z_loss:g}"] if train.z_loss else []
    parts += ["ends of documents masked"] if data.mask_end_of_document else []
    parts += [] if data.cross_document_attention else ["attention inside documents"]
    return ", ".join(parts)

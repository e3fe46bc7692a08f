"""A pipeline's schedule, checked, timed and drawn: who computes which microbatch when, what is held, what is idle.

python -m megalite plan schedule parallel.pp=4 train.global_batch_size=8 train.micro_batch_size=1
python -m megalite plan schedule parallel.pp=4 parallel.vpp=2 parallel.schedule=interleaved train.global_batch_size=8 \\
    train.micro_batch_size=1 --picture interleaved.svg
python -m megalite plan schedule --measured runs/my-run --picture measured.svg

OVERRIDES are those of pretrain_gpt.py. Times are simulated: all ranks take equally long, a backward pass twice as long
as a forward pass, transfers no time. With --measured they are those that a run recorded.
Exit status: 0, or 2 refused.
"""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megalite.commands.command import PICTURE, RANKS, Shown, command, option
from megalite.config.arguments import number_from
from megalite.config.compose import load_values
from megalite.config.parallel_rules import LAYOUT_RULES, SCHEDULE_RULES, schedule_request
from megalite.config.rule import Case, problems_of
from megalite.errors.problems import NO_VALUE, Problem, refuse
from megalite.pipeline.checker import check
from megalite.pipeline.schedules import build_schedule
from megalite.plan.timeline import (
    FORWARD_PASSES,
    MILLISECONDS,
    Timeline,
    Unit,
    read_recording,
    schedule_picture,
    simulated,
)

READ = (  # the settings that concern the schedule; of the model and of other axes nothing is asked
    *(f"parallel.{name}" for name in ("pp", "vpp", "schedule", "microbatch_group_size")),
    *("train.global_batch_size", "train.micro_batch_size"),
)
MOST_CELLS = 64  # actions of a rank that are listed


@command(
    PICTURE,
    option("--dp", **RANKS, help="data-parallel size (default: 1)"),
    option("--measured", type=Path, metavar="RUN_DIR", help="a run that recorded its pipeline"),
    option("--step", type=number_from(0), metavar="N", help="which recorded step (default: the last)"),
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    recorded = options.measured is not None
    idle = [*overrides[:1], *["--dp"] * bool(options.dp)] if recorded else ["--step"] * (options.step is not None)
    rule = f"has no effect {'with' if recorded else 'without'} --measured RUN_DIR"
    refuse([Problem(word, NO_VALUE, rule, "leave it out") for word in idle])
    if recorded:
        step, timeline = read_recording(options.measured, options.step, "--measured")
        title, unit = f"{timeline.title}; measured in step {step}", MILLISECONDS
    else:
        timeline, unit = simulate(overrides, options.dp or 1), FORWARD_PASSES
        title = timeline.title
    return Shown(lines(timeline, unit, title), draw=lambda: schedule_picture(timeline, unit, title))


def simulate(overrides: list[str], dp: int) -> Timeline:
    """The timeline of the schedule that the overrides ask for, once it is checked; UserError with all that is wrong."""
    config = load_values(overrides, READ)
    refuse(problems_of(Case(config, config.parallel.pp * dp), LAYOUT_RULES + SCHEDULE_RULES))
    schedule = build_schedule(schedule_request(config, config.parallel.pp * dp))
    flaws = check(schedule)
    assert not flaws, "\n".join(map(str, flaws))
    return simulated(schedule)


def lines(timeline: Timeline, unit: Unit, title: str) -> Iterator[str]:
    """The timeline in words: for each rank what it holds at most, and its first actions."""
    yield from (title, timeline.summary(unit), "")
    for rank, spans in enumerate(timeline.ranks):
        cells = " ".join(str(span.action) for span in spans[:MOST_CELLS])
        yield f"rank {rank:<3} holds at most {timeline.held(rank):<16} {cells}{' ...' * (len(spans) > MOST_CELLS)}"

"""A pipeline's schedule, checked, timed and drawn: who computes which microbatch when, what is held, what is idle.

python scripts/schedule.py parallel.pp=4 train.global_batch_size=8 train.micro_batch_size=1
python scripts/schedule.py parallel.pp=4 parallel.vpp=2 parallel.schedule=interleaved train.global_batch_size=8 \\
    train.micro_batch_size=1 --picture interleaved.png
python scripts/schedule.py --measured runs/my-run --picture measured.png

OVERRIDES are those of pretrain_gpt.py. Times are simulated: all ranks take equally long, a backward pass twice as long
as a forward pass, transfers no time. With --measured they are those that a run recorded.
Exit status: 0, or 2 refused.
"""

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megalite.config.case import Case
from megalite.config.parallel_rules import (
    batch_splits_over_ranks,
    schedule_request,
    schedule_suits_the_pipeline,
    world_splits_into_the_layout,
)
from megalite.config.part import load_values
from megalite.config.remedies import problems_of
from megalite.errors.problems import NO_VALUE, REFUSED, Problem, UserError, collect
from megalite.observe.screens import print_lines
from megalite.pipeline.actions import Schedule
from megalite.pipeline.checker import check
from megalite.pipeline.schedules import build_schedule
from megalite.pipeline.simulator import equal_durations
from megalite.plan.drawing import picture_problems, save_picture
from megalite.plan.recording import read_recording
from megalite.plan.schedule_picture import figure_of
from megalite.plan.timeline import FORWARD_PASSES, MILLISECONDS, Timeline, Unit, simulated

READ = (  # the settings that concern the schedule; of the model and of other axes nothing is asked
    "parallel.pp",
    "parallel.vpp",
    "parallel.schedule",
    "parallel.microbatch_group_size",
    "train.global_batch_size",
    "train.micro_batch_size",
)
RULES = (world_splits_into_the_layout, batch_splits_over_ranks, schedule_suits_the_pipeline)
MOST_CELLS = 64  # actions of a rank that are listed


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's options, and the words for the launcher."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--picture FILE] [--dp N] [OVERRIDES ...]\n"
        "       %(prog)s [--picture FILE] --measured RUN_DIR [--step N]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the timeline, to a .png or .svg file")
    parser.add_argument("--dp", type=int, metavar="N", help="data-parallel size (default: 1)")
    parser.add_argument("--measured", type=Path, metavar="RUN_DIR", help="a run that recorded its pipeline")
    parser.add_argument("--step", type=int, metavar="N", help="which recorded step (default: the last)")
    return parser.parse_known_args(arguments)


def read(overrides: list[str], dp: int) -> Schedule:
    """The schedule that the overrides ask for; a UserError with everything that stands against it."""
    problems = [Problem("--dp", dp, "must be at least 1", "--dp 1")] if dp < 1 else []
    config = collect(lambda: load_values(overrides, READ), problems)
    if config is None or problems:
        raise UserError(problems)
    world_size = config.parallel.pp * dp
    if problems := problems_of(Case(config, world_size), RULES):
        raise UserError(problems)
    return build_schedule(schedule_request(config, world_size)[0])


def lines_of(timeline: Timeline, unit: Unit, title: str) -> Iterator[str]:
    """What is told about a timeline without a picture."""
    yield title
    yield timeline.summary(unit)
    yield ""
    for rank, spans in enumerate(timeline.ranks):
        cells = " ".join(str(span.action) for span in spans[:MOST_CELLS])
        more = f" and {len(spans) - MOST_CELLS} more" if len(spans) > MOST_CELLS else ""
        yield f"rank {rank:<3} holds at most {timeline.held(rank):<16} {cells}{more}"


def checked(overrides: list[str], dp: int) -> Timeline:
    """The timeline of the schedule that the overrides ask for, once it is checked."""
    schedule = read(overrides, dp)
    flaws = check(schedule)
    assert not flaws, "\n".join(map(str, flaws))
    share = 1 / schedule.vpp  # of a rank's layers
    return simulated(schedule, equal_durations(schedule, share, share, share))


def timeline_of(options: argparse.Namespace, overrides: list[str]) -> tuple[Timeline, Unit, str]:
    """What is to be shown, in which unit, under which title; a UserError with everything that stands against it."""
    problems = [] if options.picture is None else picture_problems(options.picture, "--picture")
    if options.measured is None:
        if options.step is not None:
            problems.append(
                Problem("--step", options.step, "is a recorded step", "--measured RUN_DIR, or leave it out")
            )
        timeline = collect(lambda: checked(overrides, 1 if options.dp is None else options.dp), problems)
        title = timeline.title if timeline else ""
    else:
        for word in [*overrides[:1], *(["--dp"] if options.dp is not None else [])]:
            rule = "has no effect with --measured: the run was as it was"
            problems.append(Problem(word, NO_VALUE, rule, "leave it out"))
        found = collect(lambda: read_recording(options.measured, options.step, "--measured"), problems)
        step, timeline = found or (0, None)
        title = f"{timeline.title}; measured in step {step}" if timeline else ""
    if problems or timeline is None:
        raise UserError(problems)
    return timeline, FORWARD_PASSES if options.measured is None else MILLISECONDS, title


def main(arguments: Sequence[str] | None = None) -> int:
    gc.disable()  # a large table is a million small records, none of them in a circle
    options, overrides = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        timeline, unit, title = timeline_of(options, overrides)
        if options.picture is not None:
            save_picture(lambda: figure_of(timeline, unit, title), options.picture, "--picture")
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    picture = [] if options.picture is None else ["", f"picture: {options.picture}"]
    print_lines([*lines_of(timeline, unit, title), *picture])
    return 0

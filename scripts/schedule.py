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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalite.config.arguments import read_arguments
from megalite.config.bounds import bounds
from megalite.config.compose import hydra_loader
from megalite.config.overrides import Examination
from megalite.config.parallel_rules import batch_splits_over_ranks, schedule_request, world_splits_into_the_layout
from megalite.config.pipeline_rules import schedule_suits_the_pipeline
from megalite.config.problems import REFUSED, Problem, UserError, collect
from megalite.config.schema import Config
from megalite.config.settings import with_values
from megalite.parallel.picture import picture_problems
from megalite.pipeline.actions import Schedule
from megalite.pipeline.checker import check
from megalite.pipeline.painter import save_timeline
from megalite.pipeline.recording import read_recording
from megalite.pipeline.schedules import build_schedule
from megalite.pipeline.simulator import simulate
from megalite.pipeline.timeline import FORWARD_PASSES, MILLISECONDS, Timeline, Unit, equal_durations
from megalite.train.screens import print_lines

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
    composed = _compose(overrides)
    config = with_values(Config(), {name: OmegaConf.select(composed, name) for name in READ})
    problems = [Problem("--dp", dp, "must be at least 1", "--dp 1")] if dp < 1 else []
    problems += bounds(config)
    world_size = config.parallel.pp * dp
    if problems := problems or [problem for rule in RULES for problem in rule(config, world_size)]:
        raise UserError(problems)
    return build_schedule(schedule_request(config, world_size)[0])


def _compose(overrides: list[str]) -> DictConfig:
    """The launcher's config, of which only what concerns the schedule is looked at."""
    arguments, problems = read_arguments(overrides)
    with hydra_loader(arguments) as loader:
        examination = Examination(loader, arguments)
        for word in arguments.overrides:
            examination.examine(word)
        if problems := [*problems, *examination.problems]:
            raise UserError(problems)
        words = [*arguments.search_path, *examination.accepted]
        try:
            composed = loader.load_configuration(arguments.config_name, words, run_mode=RunMode.RUN, from_shell=False)
        except (HydraException, OmegaConfBaseException) as error:
            remedy = "see docs/configuration.md"
            raise UserError(Problem("overrides", " ".join(overrides), str(error).splitlines()[0], remedy)) from error
    assert isinstance(composed, DictConfig)
    return composed


def lines_of(timeline: Timeline, unit: Unit, title: str) -> Iterator[str]:
    """What is told about a timeline without a picture."""
    yield title
    yield timeline.summary(unit)
    yield ""
    for rank, spans in enumerate(timeline.ranks):
        cells = " ".join(str(span.action) for span in spans[:MOST_CELLS])
        more = f" and {len(spans) - MOST_CELLS} more" if len(spans) > MOST_CELLS else ""
        yield f"rank {rank:<3} holds at most {timeline.held(rank):<16} {cells}{more}"


def simulated(overrides: list[str], dp: int) -> Timeline:
    """The timeline of the schedule that the overrides ask for, once it is checked."""
    schedule = read(overrides, dp)
    flaws = check(schedule)
    assert not flaws, "\n".join(map(str, flaws))
    share = 1 / schedule.vpp  # of a rank's layers
    return simulate(schedule, equal_durations(schedule, share, share, share))


def timeline_of(options: argparse.Namespace, overrides: list[str]) -> tuple[Timeline, Unit, str]:
    """What is to be shown, in which unit, under which title; a UserError with everything that stands against it."""
    problems = [] if options.picture is None else picture_problems(options.picture, "--picture")
    if options.measured is None:
        if options.step is not None:
            problems.append(
                Problem("--step", options.step, "is a recorded step", "--measured RUN_DIR, or leave it out")
            )
        timeline = collect(lambda: simulated(overrides, 1 if options.dp is None else options.dp), problems)
        title = timeline.title if timeline else ""
    else:
        for word in [*overrides[:1], *(["--dp"] if options.dp is not None else [])]:
            rule = "has no effect with --measured: the run was as it was"
            problems.append(Problem(word, ..., rule, "leave it out"))
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
            save_timeline(timeline, options.picture, unit, title=title, setting="--picture")
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    picture = [] if options.picture is None else ["", f"picture: {options.picture}"]
    print_lines([*lines_of(timeline, unit, title), *picture])
    return 0


if __name__ == "__main__":
    sys.exit(main())

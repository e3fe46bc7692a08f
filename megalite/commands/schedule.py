"""A pipeline's schedule, checked, timed and drawn: who computes which microbatch when, what is held, what is idle.

python -m megalite plan schedule parallel.pp=4 train.global_batch_size=8 train.micro_batch_size=1
python -m megalite plan schedule parallel.pp=4 parallel.vpp=2 parallel.schedule=interleaved train.global_batch_size=8 \\
    train.micro_batch_size=1 --picture interleaved.svg

OVERRIDES are those of pretrain_gpt.py. Times are simulated: all ranks take equally long, a backward pass twice as long
as a forward pass, transfers no time. The report of a run shows what it recorded (train.record_pipeline).
Exit status: 0, or 2 refused.
"""

from argparse import Namespace
from collections.abc import Iterator

from megalite.commands.command import PICTURE, RANKS, Shown, command, option
from megalite.config.compose import load_values
from megalite.config.parallel_rules import LAYOUT_RULES, SCHEDULE_RULES, schedule_request
from megalite.config.rule import Case, problems_of
from megalite.errors.problems import refuse
from megalite.pipeline.checker import check
from megalite.pipeline.schedules import build_schedule
from megalite.plan.timeline import FORWARD_PASSES, Timeline, schedule_picture, simulated

READ = (  # the settings that concern the schedule; of the model and of other axes nothing is asked
    *(f"parallel.{name}" for name in ("pp", "vpp", "schedule", "microbatch_group_size")),
    *("train.global_batch_size", "train.micro_batch_size"),
)
MOST_CELLS = 64  # actions of a rank that are listed


@command(PICTURE, option("--dp", **RANKS, default=1, help="data-parallel size (default: %(default)s)"))
def main(options: Namespace, overrides: list[str]) -> Shown:
    config = load_values(overrides, READ)
    world_size = config.parallel.pp * options.dp
    refuse(problems_of(Case(config, world_size), LAYOUT_RULES + SCHEDULE_RULES))
    schedule = build_schedule(schedule_request(config, world_size))
    flaws = check(schedule)
    assert not flaws, "\n".join(map(str, flaws))
    timeline = simulated(schedule)
    return Shown(lines(timeline), draw=lambda: schedule_picture(timeline, FORWARD_PASSES, timeline.title))


def lines(timeline: Timeline) -> Iterator[str]:
    """The timeline in words: for each rank what it holds at most, and its first actions."""
    yield from (timeline.title, timeline.summary(FORWARD_PASSES), "")
    for rank, spans in enumerate(timeline.ranks):
        cells = " ".join(str(span.action) for span in spans[:MOST_CELLS])
        yield f"rank {rank:<3} holds at most {timeline.held(rank):<16} {cells}{' ...' * (len(spans) > MOST_CELLS)}"

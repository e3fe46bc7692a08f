"""Schedules of all legal shapes, for properties."""

from hypothesis import strategies as st

from megalite.config.rules import schedule_flaws
from megalite.config.schedule_request import ScheduleRequest
from megalite.pipeline.actions import Schedule, parse_action
from megalite.pipeline.schedules import build_schedule, forward_only


def schedule(name: str, pp: int, microbatches: int, vpp: int = 1, group_size: int | None = None) -> Schedule:
    return build_schedule(ScheduleRequest(name, pp, microbatches, vpp, group_size))


def parse(text: str) -> Schedule:
    """The schedule of a line for each rank and a cell for each action."""
    ranks = tuple(tuple(map(parse_action, line.split())) for line in text.splitlines())
    actions = [action for line in ranks for action in line]
    return Schedule(
        "custom",
        vpp=1 + max(action.chunk for action in actions),
        microbatches=1 + max(action.microbatch for action in actions),
        ranks=ranks,
    )


def text_of(schedule: Schedule) -> list[str]:
    """Such lines."""
    return [" ".join(map(str, actions)) for actions in schedule.ranks]


@st.composite
def requests(draw: st.DrawFn) -> ScheduleRequest:
    """Legal ones, of up to 8 ranks with 4 chunks."""
    name = draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved", "interleaved"]))
    if name != "interleaved":
        return ScheduleRequest(name, draw(st.integers(1, 8)), draw(st.integers(1, 20)))
    pp = draw(st.integers(2, 8))
    microbatches = draw(st.integers(pp, 20))
    sizes = [None, *range(pp, microbatches + 1)]
    vpp = draw(st.integers(2, 4))
    legal = [ScheduleRequest(name, pp, microbatches, vpp, size) for size in sizes]
    return draw(st.sampled_from([request for request in legal if not [*schedule_flaws(request)]]))


training = requests().map(build_schedule)
evaluation = st.builds(forward_only, st.integers(2, 8), st.integers(1, 4), st.integers(1, 20))
schedules = training | evaluation

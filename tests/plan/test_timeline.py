"""A timeline tells what ranks hold and how much of a step is idle."""

import pytest

from megalite.pipeline.actions import parse_action
from megalite.pipeline.simulator import Span
from megalite.plan.timeline import InFlight, Timeline, in_flight, simulated
from tests.pipeline.shapes import schedule


def test_a_timeline_of_nothing_is_no_division_by_zero() -> None:
    line = Timeline("1f1b", 1, 0, ((), ()))
    assert (line.makespan, line.bubble, line.idle) == (0, 0, 0)
    assert Timeline("1f1b", 1, 1, ((Span(parse_action("0F0"), 0, 0),),)).bubble == 0


def test_what_a_rank_holds_is_told_in_microbatches_of_all_its_layers() -> None:
    assert [simulated(schedule("1f1b", 2, 4)).held(rank) for rank in range(2)] == ["2 microbatches", "1 microbatch"]
    assert [simulated(schedule("interleaved", 4, 8, vpp=2)).held(rank) for rank in (0, 3)] == [
        "5.5 microbatches",
        "2.5 microbatches",
    ]
    assert simulated(schedule("interleaved", 4, 8, vpp=2)).title == "interleaved: pp 4, vpp 2, 8 microbatches"


@pytest.mark.parametrize(
    ("line", "held"),
    [
        ("", InFlight(0, 0, 0)),
        ("0F0 0B0 0F1 0B1", InFlight(1, 0, 1)),
        ("0F0 0F1 1F0 0B0 0F2", InFlight(3, 0, 3)),
        ("0F0 0I0 0F1 0I1 0W0 0W1", InFlight(1, 2, 2)),
        ("0F0 0F1 0I0 0W0 0F2 0I1 0I2 0W1 0W2", InFlight(2, 2, 2)),
    ],
)
def test_an_activation_is_held_from_its_forward_to_its_backward_pass(line: str, held: InFlight) -> None:
    assert in_flight([parse_action(cell) for cell in line.split()]) == held

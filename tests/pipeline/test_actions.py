"""Tables of actions as text, and what a rank holds while it performs them."""

import pytest
from hypothesis import given

from megalite.config.problems import UserError
from megalite.pipeline.actions import Action, InFlight, Schedule, in_flight, parse, parse_action, render
from tests.pipeline.shapes import schedule, schedules


def test_a_cell_is_chunk_letter_microbatch() -> None:
    cells = {
        "0F3": Action("forward", 0, 3),
        "2B1": Action("backward", 2, 1),
        "1I12": Action("backward-input", 1, 12),
        "1W0": Action("backward-weight", 1, 0),
    }
    assert {str(action): action for action in cells.values()} == cells
    assert {cell: parse_action(cell) for cell in cells} == cells


@pytest.mark.parametrize("cell", ["", "F3", "0F", "0X3", "0f3", "0F3 ", "-1F3", "0F٣", "0F3\n", "9999999999F0"])
def test_what_is_no_action_is_refused(cell: str) -> None:
    with pytest.raises(UserError, match="chunk, one of F B I W, microbatch: 0F3"):
        parse_action(cell)


@given(schedules)
def test_a_table_survives_its_text(original: Schedule) -> None:
    read = parse(render(original), original.name)
    assert (read.ranks, read.vpp, read.microbatches) == (original.ranks, original.vpp, original.microbatches)
    assert (read.pp, read.forward_only) == (original.pp, original.forward_only)


def test_the_text_has_a_line_for_each_rank_and_a_column_for_each_action() -> None:
    text = (
        "0F0  0F1  0F2  0B0  0F3  0B1  0F4  0B2  0F5  0B3  0F6  0B4  0F7  0B5  0F8  0B6  0F9  0B7  0F10 0B8  0B9  0B10"
    )
    assert render(schedule("1f1b", 3, 11)).splitlines()[0] == text


def test_all_cells_that_are_no_actions_are_told_at_once() -> None:
    with pytest.raises(UserError) as refused:
        parse("0F0 0G0\n\n0F0 B\n")
    assert [problem.value for problem in refused.value.problems] == ["0G0", "B"]


def test_chunks_are_dealt_to_the_ranks_in_turn() -> None:
    one = schedule("interleaved", 4, 4, vpp=3)
    assert [[one.stage(rank, chunk) for rank in range(4)] for chunk in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert (one.pp, one.stages) == (4, 12)


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

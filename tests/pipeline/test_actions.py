"""Actions as text."""

import pytest

from megalite.pipeline.actions import Action, parse_action


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
    with pytest.raises(ValueError, match="chunk, one of F B I W, microbatch: 0F3"):
        parse_action(cell)

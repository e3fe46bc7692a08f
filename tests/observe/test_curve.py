"""The text picture of a loss curve: known answers, and a frame that holds any curve."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megalite.observe.terminal import curve

FALLING = np.array([(step, 10.0 - step) for step in range(10)])
NOTHING = np.zeros((0, 2))


def test_a_line_falls_and_validation_points_lie_over_it() -> None:
    assert curve(FALLING, np.array([(0, 1.0), (9, 10.0)]), width=5, height=2) == [
        " 10.0000 │⠉⠤  ●",
        "  1.0000 │● ⠉⠒⣀",
        "         └─────",
        "          0             9",
    ]
    constant = curve(np.array([(1, 2.0), (2, 2.0)]), NOTHING, width=6, height=3)
    assert constant[:3] == ["  2.0000 │⠉⠉⠉⠉⠉⠉", "         │", "  2.0000 │"]


place = st.tuples(st.integers(0, 10**7), st.floats(-99, 999))
points = st.lists(place, min_size=2, max_size=200, unique_by=lambda it: it[0])


@given(points.map(sorted))
def test_any_curve_fits_its_frame(points: list[tuple[int, float]]) -> None:
    lines = curve(np.array(points), np.array(points[:3]))
    assert len(lines) == 12
    assert all(len(line) <= 84 for line in lines)

"""The text picture of a loss curve, with known answers."""

from hypothesis import given
from hypothesis import strategies as st

from megalite.observe.curve import draw_curve, smoothed

FALLING = [(step, float(10 - step)) for step in range(10)]


def test_a_falling_line_in_braille() -> None:
    assert draw_curve(FALLING, [], width=5, height=2) == [
        "   10.00 ┤⠉⠳⣄",
        "    1.00 ┤  ⠈⠳⣄",
        "         └─────",
        "          0   9",
    ]


def test_validation_points_lie_over_the_line() -> None:
    lines = draw_curve(FALLING, [(0, 1.0), (9, 10.0)], width=5, height=2)
    assert lines[:2] == ["   10.00 ┤⠉⠳⣄ ●", "    1.00 ┤● ⠈⠳⣄"]


def test_validation_alone_sets_the_scale() -> None:
    lines = draw_curve([], [(5, 2.0), (10, 1.0)], width=6, height=3)
    assert lines == ["    2.00 ┤●", "         │", "    1.00 ┤     ●", "         └──────", "          5   10"]


def test_nothing_is_no_picture() -> None:
    assert draw_curve([], []) == []


def test_a_constant_curve_is_one_line() -> None:
    lines = draw_curve([(1, 2.0), (2, 2.0)], [], width=6, height=3)
    assert lines[:3] == ["  2.0000 ┤", "         │⠤⠤⠤⠤⠤⠤", "  2.0000 ┤"]


def test_smoothing_takes_the_noise_and_leaves_the_ends_in_place() -> None:
    zigzag = [(step, 1.0 + step % 2) for step in range(101)]
    flat = smoothed(zigzag, window=20)
    assert flat[0] == (0, 1.0)
    assert flat[-1] == (100, 1.0)
    assert all(abs(loss - 1.5) < 0.03 for _, loss in flat[10:-10])


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.floats(-99, 999)), max_size=200).map(sorted),
    st.integers(20, 100),
    st.integers(3, 20),
)
def test_any_curve_fits_its_frame(points: list[tuple[int, float]], width: int, height: int) -> None:
    lines = draw_curve(points, points[:3], width=width, height=height)
    assert len(lines) == (height + 2 if points else 0)
    assert all(len(line) <= width + 14 for line in lines)

"""Curves of any numbers are drawn, without those that are not finite."""

import re
from math import inf, nan

import pytest

from megalite.plan.chart import HEIGHT, LEFT, TOP, WIDTH, chart
from megalite.plan.picture import Picture

Points = list[tuple[float, float]]


def curves_of(picture: Picture) -> list[Points]:
    """The places of the points of each curve that has some."""
    drawn = picture.file("report")
    assert not re.search(r"\b(nan|inf)\b", drawn)
    lines = [line for line in re.findall(r'<path d="M(.*?)" class="c\d line"', drawn) if "h24" not in line]
    return [[(float(x), float(y)) for x, y in map(str.split, line.split("L"))] for line in lines]


def test_points_that_are_not_finite_are_left_out() -> None:
    picture = chart(
        "loss", [("a", [(0, 1.0), (1, nan), (2, inf), (3, -inf), (4, 3.0), (nan, 9.0)]), ("b", [(2, nan)])], "step"
    )
    assert curves_of(picture) == [[(LEFT, TOP + HEIGHT), (LEFT + WIDTH, TOP)]]
    assert all(f">{name}</text>" in picture.file("report") for name in "ab")


def test_a_chart_without_a_point_has_axes() -> None:
    picture = chart("loss", [("a", [(1, nan)])], "step")
    assert curves_of(picture) == []
    assert ">0</text>" in picture.svg()


@pytest.mark.parametrize("value", [0.0, 2.5, -1e17, 1e17, 1e300, -1e-300, 5e-324])
def test_equal_values_lie_in_the_middle(value: float) -> None:
    assert curves_of(chart("loss", [("a", [(7, value)])], "step")) == [[(LEFT + WIDTH / 2, TOP + HEIGHT / 2)]]


def test_values_that_differ_by_a_rounding_lie_in_the_middle() -> None:
    ((start, end),) = curves_of(chart("loss", [("a", [(0, 1.0), (1, 1.0 + 2**-52)])], "step"))
    assert start[1] == end[1] == TOP + HEIGHT / 2


@pytest.mark.parametrize("ends", [(-1e300, 1e300), (0.0, 1e-290), (1e17, 1e17 + 16), (1.0, 1.0 + 1e-10)])
def test_a_range_of_any_size_has_ticks(ends: tuple[float, float]) -> None:
    picture = chart("loss", [("a", [(0, ends[0]), (1, ends[1])])], "step")
    levels = {float(level) for level in re.findall(rf"M{LEFT} (\S+)H", picture.svg())}
    assert 2 <= len(levels) <= 7
    assert all(TOP - 0.1 <= level <= TOP + HEIGHT + 0.1 for level in levels)

"""Charts are well-formed pictures of any numbers, at round values, in the page's colours."""

import json
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megalite.layout.ranks import ParallelLayout
from megalite.observe.readable import short
from megalite.observe.report.charts import (
    FEW,
    MOST_COLUMNS,
    Axis,
    Chart,
    Figure,
    Line,
    axis_of,
    column_chart,
    limits,
    line_chart,
    share_chart,
)
from megalite.observe.report.layout_picture import Picture, layout_pictures
from megalite.observe.report.page import environment
from megalite.observe.run_data import Bucket

FINITE = st.floats(-1e30, 1e30, allow_subnormal=False)
MACROS = environment().get_template("macros.html").module


def drawn(picture: Chart | Picture | None) -> str:
    macro = "layout_picture" if isinstance(picture, Picture) else "chart"
    return str(getattr(MACROS, macro)(picture)).strip()


def parsed(picture: Chart | Picture | None) -> ElementTree.Element:
    """The picture as a tree. Whatever is no XML, or no number, is an error."""
    svg = drawn(picture)
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<(title|text).*?</\1>", "", svg))
    return ElementTree.fromstring(svg)


def line(values: list[float], name: str = "loss") -> Line:
    points = [Bucket(at, at, value - abs(value) / 10, value, value, 1) for at, value in enumerate(values)]
    return Line(name, points, 3, smooth=True, dots=True)


@given(st.lists(FINITE, min_size=1, max_size=200), st.booleans())
@example([0.0, 3.76e-308], False)
@example([3e-308, 3.76e-308], False)
@example([4.8e13, 3.67e-295], False)
def test_any_values_are_drawn_and_what_is_seen_lies_inside_the_frame(values: list[float], from_zero: bool) -> None:
    chart = line_chart("a chart", [line(values)], Figure("", from_zero=from_zero))
    assert chart is not None
    tree = parsed(chart)
    inner = tree.find("svg")
    assert inner is not None
    left, top, width, height = map(float, inner.attrib["viewBox"].split())
    assert (left, top, left + width, top + height) >= (0, 0)
    assert left + width <= chart.width
    assert top + height <= chart.height
    for curve in (path for path in inner.iter("path") if "curve" in path.attrib["class"]):
        for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", curve.attrib["d"]):
            assert left <= float(x) <= left + width
            assert len(values) >= FEW or top <= float(y) <= top + height


@given(FINITE, FINITE, st.integers(3, 6), st.booleans())
@example(0.0, 3.76e-308, 5, False)
def test_ticks_are_round_and_inside_the_axis(one: float, other: float, ticks: int, from_zero: bool) -> None:
    axis = axis_of([one, other], ticks=ticks, from_zero=from_zero)
    assert axis.low <= min(one, other)
    assert axis.high >= max(one, other)
    assert 1 <= len(axis.ticks) <= 2 * ticks + 2
    assert all(-0.01 <= axis.place(tick) <= 1.01 for tick in axis.ticks)


@pytest.mark.parametrize("odd", [[900.0], [11.0, 9.0, 6.0], [-500.0], [900.0, -500.0]])
def test_first_steps_and_spikes_do_not_flatten_a_curve(odd: list[float]) -> None:
    values = [2.0 + math.sin(at) for at in range(100)]
    low, high = limits([*odd, *values])
    assert 0 <= low <= min(values) + 0.05
    assert max(values) - 0.05 <= high <= 4.1
    picture = parsed(line_chart("loss", [line([*odd, *values])], Figure("")))
    curve = next(path for path in picture.iter("path") if "curve" in path.attrib["class"])
    heights = [float(y) for _, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", curve.attrib["d"])][10:]
    assert max(heights) - min(heights) > 60  # of 175
    said = [text.text for text in picture.iter("text") if (text.text or "").startswith("up to")]
    assert said == ([f"up to {short(max(odd))}"] if max(odd) > 4 else [])


def test_no_value_of_a_short_or_an_even_curve_is_left_out() -> None:
    assert limits([900.0, 1.0, 1.0, 1.0]) == (1.0, 900.0)
    assert limits([float(at) for at in range(1000)]) == (0.0, 999.0)
    assert limits([1.0] * 50 + [2.0]) == (1.0, 2.0)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_steps_have_whole_numbers_on_their_axis(steps: list[int]) -> None:
    axis = axis_of([float(step) for step in steps], counts=True)
    assert all(tick == round(tick) for tick in axis.ticks)
    assert len(set(steps)) == 1 or (axis.low, axis.high) == (min(steps), max(steps))


def test_numbers_on_an_axis_are_short() -> None:
    assert [short(value) for value in (0.0, 0.25, 1500.0, 2e6, 3e-5)] == ["0", "0.25", "1.5k", "2M", "3e-5"]
    axis = Axis(0.0, 1.0, ())
    assert Chart("", "", Figure("", share=True), axis, axis).tick(0.25) == "25%"


def test_a_chart_says_its_values_to_who_cannot_see_it_and_to_its_script() -> None:
    tree = parsed(line_chart("loss", [line([4.0, 3.0, 2.5])], Figure("", short)))
    title = tree.find("title")
    assert title is not None
    assert title.text == "loss: loss from 4 at step 0 to 2.5 at step 2"
    assert tree.attrib["role"] == "img"
    data = json.loads(tree.attrib["data-chart"])
    assert data["lines"][0]["name"] == "loss"
    assert data["lines"][0]["points"] == [[0.0, 4.0, 3.6, 4.0], [1.0, 3.0, 2.7, 3.0], [2.0, 2.5, 2.25, 2.5]]


def test_a_name_is_no_markup() -> None:
    picture = line_chart("<b>", [line([1.0, 2.0], "<script>&\"'")], Figure(""))
    assert "<script" not in drawn(picture)
    assert "<b>" not in drawn(picture)
    assert "<script>&\"'" in parsed(picture).attrib["data-chart"].replace('\\"', '"')


def test_nothing_to_draw_is_said() -> None:
    assert "nothing yet" in drawn(line_chart("loss", [Line("loss", [], 0)], Figure("")))
    assert "nothing yet" in drawn(share_chart("time", {"data": []}))


def test_shares_fill_their_frame_also_of_a_single_step() -> None:
    for steps in ([5], [1, 2, 3]):
        seconds = {"a": 1.0, "b": 3.0, "c": 0.0}
        parts = {
            name: [Bucket(step, step, value, value, value, 1) for step in steps] for name, value in seconds.items()
        }
        tree = parsed(share_chart("time", parts))
        areas = [path.attrib["d"] for path in tree.iter("path") if path.attrib["class"].startswith("area")]
        assert len(areas) == 3
        heights = {float(y) for area in areas for y in re.findall(r" ([\d.]+)", area)}
        assert len(heights) == 3  # the floor, a quarter, the top
        first, quarter, floor = sorted(heights)
        assert (floor - quarter) / (floor - first) == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("ranks", [1, 2, 9, 64, 5000])
def test_no_rank_is_lost_among_columns(ranks: int) -> None:
    values = [1.0] * (ranks - 1) + [7.0]
    tree = parsed(column_chart("memory", values, Figure("", short), marked=[ranks - 1]))
    columns = list(tree.iter("rect"))
    assert len(columns) <= MOST_COLUMNS
    highest = max(columns, key=lambda column: float(column.attrib["height"]))
    assert highest.attrib["class"] == "column c3"
    assert (highest.findtext("title") or "").endswith(": 7")


@pytest.mark.parametrize(
    ("layout", "per_node", "panels"),
    [
        (ParallelLayout(), 1, 1),
        (ParallelLayout(dp=3), 3, 1),
        (ParallelLayout(tp=2, dp=4, pp=4), 8, 3),
        (ParallelLayout(tp=4, pp=16, dp=64), 8, 3),
    ],
)
def test_a_layout_is_drawn_with_each_rank_once_per_axis(layout: ParallelLayout, per_node: int, panels: int) -> None:
    figures = [parsed(figure) for figure in layout_pictures(layout, per_node)]
    assert len(figures) == panels
    for figure in figures:
        ranks = [text.text for text in figure.iter("text") if text.text and text.text.isdigit()]
        assert ranks == [str(rank) for rank in range(len(ranks))]
        assert len(ranks) == min(layout.world_size, 72 if layout.world_size > 144 else 144)

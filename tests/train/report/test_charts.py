"""Charts are well-formed pictures of any numbers, at round values, in the page's colours."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megalite.parallel.layout import ParallelLayout
from megalite.train.report.axes import axis_of, labels, percent, scientific, short
from megalite.train.report.charts import MOST_COLUMNS, Line, Look, Point, column_chart, line_chart, share_chart
from megalite.train.report.layout_picture import layout_pictures
from megalite.train.report.markup import Markup, tag

FINITE = st.floats(-1e30, 1e30, allow_subnormal=False)


def parsed(picture: str) -> ElementTree.Element:
    """The picture as a tree. Whatever is no XML, or no number, is an error."""
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<(title|text).*?</\1>", "", picture))
    return ElementTree.fromstring(picture)


def line(values: list[float], name: str = "loss") -> Line:
    points = [Point(at, value, value - abs(value) / 10, value) for at, value in enumerate(values)]
    return Line(name, points, 3, short, smooth=True, dots=True)


@given(st.lists(FINITE, min_size=1, max_size=200), st.booleans(), st.booleans())
@example([0.0, 3.76e-308], False, False)
@example([3e-308, 3.76e-308], False, True)
@example([4.8e13, 3.67e-295], False, True)
def test_any_values_are_drawn_inside_their_frame(values: list[float], from_zero: bool, steep: bool) -> None:
    look = Look(from_zero=from_zero, steep=steep)
    tree = parsed(line_chart([line(values)], "a chart", look))
    for path in tree.iter("path"):
        if "curve" in path.attrib["class"]:
            for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.attrib["d"]):
                assert 0 <= float(x) <= look.width
                assert 0 <= float(y) <= look.height


@given(FINITE, FINITE, st.integers(3, 6), st.booleans())
@example(0.0, 3.76e-308, 5, False)
def test_ticks_are_round_and_inside_the_axis(one: float, other: float, ticks: int, from_zero: bool) -> None:
    axis = axis_of([one, other], ticks=ticks, from_zero=from_zero)
    assert axis.low <= min(one, other)
    assert axis.high >= max(one, other)
    assert 1 <= len(axis.ticks) <= 2 * ticks + 2
    assert all(-0.01 <= axis.place(tick) <= 1.01 for tick in axis.ticks)


def test_values_over_many_powers_of_ten_get_a_logarithmic_axis() -> None:
    axis = axis_of([0.01, 900.0], steep=True)
    assert axis.logarithmic
    assert set(axis.ticks) >= {0.01, 1.0, 100.0}
    assert not axis_of([1.0, 3.0], steep=True).logarithmic
    assert not axis_of([0.0, 900.0], steep=True).logarithmic


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_steps_have_whole_numbers_on_their_axis(steps: list[int]) -> None:
    axis = axis_of([float(step) for step in steps], counts=True)
    assert all(tick == round(tick) for tick in axis.ticks)
    assert len(set(steps)) == 1 or (axis.low, axis.high) == (min(steps), max(steps))


def test_numbers_on_an_axis_are_short_and_alike() -> None:
    assert [short(value) for value in (0.0, 0.25, 1500.0, 2e6, 3e-5)] == ["0", "0.25", "1.5k", "2M", "3e-5"]
    assert labels([0.8, 0.9, 1.0], short) == ["0.8", "0.9", "1.0"]
    assert labels([0.0, 500.0, 1000.0], short) == ["0", "500", "1k"]
    assert [scientific(value) for value in (0.0, 0.001, 2.5e-4)] == ["0", "1e-3", "2.5e-4"]
    assert percent(0.25) == "25%"


def test_a_chart_says_its_values_where_it_is_pointed_at_and_to_who_cannot_see_it() -> None:
    tree = parsed(line_chart([line([4.0, 3.0, 2.5])], "loss"))
    title = tree.find("title")
    assert title is not None
    assert title.text == "loss: loss from 4 at step 0 to 2.5 at step 2"
    assert tree.attrib["role"] == "img"
    tips = [[text.text for text in tip.iter("text")] for tip in tree.iter("g")]
    assert tips == [["step 0", "loss 4"], ["step 1", "loss 3"], ["step 2", "loss 2.5"]]


def test_a_name_is_no_markup() -> None:
    picture = line_chart([line([1.0, 2.0], "<script>&\"'")], "<b>")
    assert "<script" not in picture
    assert "<b>" not in picture
    assert next(text.text for text in parsed(picture).iter("text") if text.text and "script" in text.text)


def test_nothing_to_draw_is_said() -> None:
    assert "nothing yet" in line_chart([Line("loss", [], 0, short)], "loss")
    assert "nothing yet" in share_chart([("data", [])], [], "time", Look())


def test_shares_fill_their_frame_also_of_a_single_step() -> None:
    for steps in ([5.0], [1.0, 2.0, 3.0]):
        parts = [("a", [1.0] * len(steps)), ("b", [3.0] * len(steps)), ("c", [0.0] * len(steps))]
        tree = parsed(share_chart(parts, steps, "time", Look()))
        areas = [path.attrib["d"] for path in tree.iter("path") if path.attrib["class"].startswith("area")]
        assert len(areas) == 3
        heights = {float(y) for area in areas for y in re.findall(r" ([\d.]+)", area)}
        assert len(heights) == 3  # the floor, a quarter, the top
        first, quarter, floor = sorted(heights)
        assert (floor - quarter) / (floor - first) == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("ranks", [1, 2, 9, 64, 5000])
def test_no_rank_is_lost_among_columns(ranks: int) -> None:
    values = [1.0] * (ranks - 1) + [7.0]
    tree = parsed(column_chart(values, "memory", short, Look(), marked=[ranks - 1]))
    columns = list(tree.iter("rect"))
    assert len(columns) <= MOST_COLUMNS
    highest = max(columns, key=lambda column: float(column.attrib["height"]))
    assert highest.attrib["class"] == "f3"
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


def test_attributes_and_children_are_escaped_but_markup_is_not() -> None:
    assert tag("p", "a < b", Markup("<i>c</i>"), title='"x"', class_="q", hidden=None) == (
        '<p title="&quot;x&quot;" class="q">a &lt; b<i>c</i></p>'
    )
    assert tag("rect", x=1.0, y=math.pi, rx=2) == '<rect x="1" y="3.14" rx="2"/>'

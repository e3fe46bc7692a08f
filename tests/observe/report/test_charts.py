"""Charts are well-formed pictures of any numbers, in the page's colours."""

import json
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megalite.observe.readable import short
from megalite.observe.report.charts import (
    MOST_COLUMNS,
    Chart,
    Figure,
    Line,
    column_chart,
    line_chart,
    share_chart,
)
from megalite.observe.report.page import environment
from megalite.observe.run_data import Bucket

FINITE = st.floats(-1e30, 1e30, allow_subnormal=False)
MACROS = environment().get_template("macros.html").module


def drawn(picture: Chart | None) -> str:
    return str(MACROS.chart(picture)).strip()  # type: ignore[attr-defined]


def parsed(picture: Chart | None) -> ElementTree.Element:
    """The picture as a tree. Whatever is no XML, or no number, is an error."""
    svg = drawn(picture)
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<(title|text).*?</\1>", "", svg))
    return ElementTree.fromstring(svg)


def line(values: list[float], name: str = "loss") -> Line:
    points = [Bucket(at, at, value - abs(value) / 10, value, value, 1) for at, value in enumerate(values)]
    return Line(name, points, Figure("", short, smooth=True, dots=True), 3)


@given(st.lists(FINITE, min_size=1, max_size=200))
@example([0.0, 3.76e-308])
@example([4.8e13, 3.67e-295])
def test_any_values_are_drawn_without_a_script_inside_their_frame(values: list[float]) -> None:
    inner = parsed(line_chart("a chart", [line(values)])).find("g")
    assert inner is not None
    for curve in inner.iter("path"):
        for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", curve.attrib["d"]):
            assert 0 <= float(x) <= 1
            assert 0 <= float(y) <= 1


def test_numbers_on_an_axis_are_short() -> None:
    assert [short(value) for value in (0.0, 0.25, 1500.0, 2e6, 3e-5)] == ["0", "0.25", "1.5k", "2M", "3e-5"]


def test_a_chart_says_its_values_to_who_cannot_see_it_and_to_its_script() -> None:
    tree = parsed(line_chart("loss", [line([4.0, 3.0, 2.5])]))
    title = tree.find("title")
    assert title is not None
    assert title.text == "loss: loss from 4 at step 0 to 2.5 at step 2"
    assert tree.attrib["role"] == "img"
    data = json.loads(tree.attrib["data-chart"])
    assert data["lines"][0]["name"] == "loss"
    assert data["lines"][0]["points"] == [[0.0, 4.0, 3.6, 4.0], [1.0, 3.0, 2.7, 3.0], [2.0, 2.5, 2.25, 2.5]]


def test_a_name_is_no_markup() -> None:
    picture = line_chart("<b>", [line([1.0, 2.0], "<script>&\"'")])
    assert "<script" not in drawn(picture)
    assert "<b>" not in drawn(picture)
    assert "<script>&\"'" in parsed(picture).attrib["data-chart"].replace('\\"', '"')


def test_nothing_to_draw_is_said() -> None:
    assert "nothing yet" in drawn(line_chart("loss", [Line("loss", [], Figure(""), 0)]))
    assert "nothing yet" in drawn(share_chart("time", {"data": []}))


def test_shares_lie_on_each_other_and_fill_the_whole() -> None:
    parts = {name: [Bucket(5, 5, value, value, value)] for name, value in {"a": 1.0, "b": 3.0, "c": 0.0}.items()}
    data = json.loads(parsed(share_chart("time", parts)).attrib["data-chart"])
    assert [it["points"] for it in data["lines"]] == [[[5, 0.25, 0, 0.25]], [[5, 1, 0.25, 1]], [[5, 1, 1, 1]]]


@pytest.mark.parametrize("ranks", [1, 2, 9, 64, 5000])
def test_no_rank_is_lost_among_columns(ranks: int) -> None:
    values = [1.0] * (ranks - 1) + [7.0]
    tree = parsed(column_chart("memory", values, Figure("", short), marked=[ranks - 1]))
    columns = list(tree.iter("rect"))
    assert len(columns) <= MOST_COLUMNS
    highest = max(columns, key=lambda column: float(column.attrib["height"]))
    assert highest.attrib["class"] == "column c3"
    assert (highest.findtext("title") or "").endswith(": 7")

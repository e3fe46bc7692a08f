"""A picture shows every action where and when it was, whatever the size."""

import re
import struct
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from megalite.pipeline.simulator import Span, equal_durations
from megalite.plan.drawing import save_picture
from megalite.plan.schedule_picture import figure_of
from megalite.plan.timeline import FORWARD_PASSES, MILLISECONDS, Timeline, Unit, simulated
from tests.pipeline.shapes import schedule


def timeline(name: str, pp: int, microbatches: int, vpp: int = 1) -> Timeline:
    table = schedule(name, pp, microbatches, vpp)
    return simulated(table, equal_durations(table, 1 / vpp, 1 / vpp, 1 / vpp))


LINE = timeline("1f1b", 2, 3)


def figure(line: Timeline) -> Figure:
    return figure_of(line, FORWARD_PASSES, line.title)


def texts_of(line: Timeline) -> list[str]:
    drawn = figure(line)
    drawn.draw_without_rendering()
    return [text.get_text() for text in drawn.findobj(Text) if text.get_visible()]


@pytest.mark.parametrize(
    ("line", "held", "kinds"),
    [
        (
            timeline("1f1b", 4, 8),
            ["4 microbatches", "3 microbatches", "2 microbatches", "1 microbatch"],
            ["forward", "backward", "idle"],
        ),
        (
            timeline("interleaved", 4, 8, vpp=2),
            ["5.5 microbatches", "4.5 microbatches", "3.5 microbatches", "2.5 microbatches"],
            ["forward, chunks 0-1", "backward, chunks 0-1", "idle"],
        ),
        (
            timeline("zb-h1", 4, 8),
            ["4 microbatches"] * 4,
            ["forward", "backward: gradients of activations", "backward: gradients of weights", "idle"],
        ),
    ],
    ids=lambda one: one.name if isinstance(one, Timeline) else "",
)
def test_ranks_microbatches_bubble_and_what_is_held_are_written(
    line: Timeline, held: list[str], kinds: list[str]
) -> None:
    texts = texts_of(line)
    numbers = [text.get_text() for text in figure(line).axes[0].texts if text.get_text().isdigit()]
    assert len(numbers) == sum(map(len, line.ranks))
    assert {line.title, line.summary(FORWARD_PASSES), "rank 0", "rank 3"} <= set(texts)
    assert [text for text in texts if re.fullmatch(r"[\d.]+ microbatch(es)?", text)] == held
    assert [text for text in texts if text in kinds] == kinds


def in_seconds(line: Timeline) -> Timeline:
    """As a run records it."""
    ranks = tuple(tuple(Span(one, start / 64, end / 64) for one, start, end in spans) for spans in line.ranks)
    return Timeline(line.name, line.vpp, line.microbatches, ranks)


@pytest.mark.parametrize(
    ("line", "unit"), [(LINE, FORWARD_PASSES), (in_seconds(LINE), Unit("ticks", 64))], ids=["", "recorded"]
)
def test_a_box_stands_where_and_as_long_as_its_action_was(line: Timeline, unit: Unit) -> None:
    rows = figure_of(line, unit, "").axes[0]
    boxes = [path.get_extents() for collection in rows.collections for path in collection.get_paths()]
    drawn = sorted((round((box.y0 + box.y1) / 2, 6), box.x0, box.x1) for box in boxes)
    actions = [(rank, start, end) for rank, spans in enumerate(LINE.ranks) for _, start, end in spans]
    assert drawn == sorted([(0, 0, 12), (1, 0, 12), *actions])
    assert rows.get_xlim() == (0, 12)
    assert rows.get_ylim()[0] > rows.get_ylim()[1]  # rank 0 on top
    centres = [(start + end) / 2 for spans in LINE.ranks for _, start, end in spans]
    assert [text.get_position()[0] for text in rows.texts if text.get_text().isdigit()] == centres


def test_schedules_of_one_batch_have_one_scale() -> None:
    def inches_per_time(line: Timeline) -> float:
        drawn = figure(line)
        return float(drawn.axes[0].get_position().width * drawn.get_figwidth() / line.makespan)

    lines = [timeline("gpipe", 4, 8), timeline("1f1b", 4, 8), timeline("zb-h1", 4, 8), timeline("interleaved", 4, 8, 2)]
    assert [inches_per_time(line) for line in lines] == pytest.approx([0.35] * 4)


def test_recorded_seconds_are_shown_in_milliseconds(tmp_path: Path) -> None:
    save_picture(lambda: figure_of(in_seconds(LINE), MILLISECONDS, "measured"), tmp_path / "measured.svg", "schedule")
    texts = re.findall(r">([^<]+)</text>", (tmp_path / "measured.svg").read_text())
    assert "time, in ms" in texts
    assert [text for text in texts if text.startswith("step 187.5 ms; idle 25.0%")]
    assert "150" in texts  # a tick of the axis


def test_thin_boxes_are_an_image_without_edges(tmp_path: Path) -> None:
    drawn = figure(timeline("1f1b", 2, 3000))
    assert [boxes.get_rasterized() for boxes in drawn.axes[0].collections] == [False, True] * 2
    save_picture(lambda: drawn, tmp_path / "long.svg", "schedule")
    assert (tmp_path / "long.svg").stat().st_size < 1_000_000


@pytest.mark.parametrize(
    "line",
    [
        timeline("gpipe", 1, 1),
        timeline("1f1b", 16, 64),
        timeline("interleaved", 3, 5, vpp=4),
        timeline("zb-h1", 100, 3),
        timeline("1f1b", 2, 1000),
        Timeline("1f1b", 1, 0, ((), ())),
    ],
    ids=lambda line: line.title,
)
def test_any_timeline_can_be_drawn_on_a_page_of_bounded_size(line: Timeline, tmp_path: Path) -> None:
    save_picture(lambda: figure(line), tmp_path / "line.png", "schedule")
    content = (tmp_path / "line.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert 1300 <= width <= 2700
    assert 300 <= height <= 1800
    assert [path.name for path in tmp_path.iterdir()] == ["line.png"]

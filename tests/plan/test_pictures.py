"""Pictures show each rank and action where it is; files appear whole or not at all."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megalite.commands.plan import ranks, schedule
from megalite.layout.ranks import ParallelLayout
from megalite.pipeline.simulator import Span
from megalite.plan.picture import Picture
from megalite.plan.ranks import GAP, MOST_RANKS, ranks_picture
from megalite.plan.timeline import FORWARD_PASSES, LEFT, Timeline, Unit, schedule_picture, simulated
from tests.pipeline.shapes import schedule as schedule_of
from tests.plan.laid_out import laid_out

Shape = tuple[str, dict[str, str]]


def shapes(picture: Picture) -> list[Shape]:
    """The elements of a picture; what is no XML, or no number, is an error."""
    text = picture.file("ranks")
    assert not re.search(r"\b(nan|inf)\b", text)
    return [(it.tag.rpartition("}")[2], {**it.attrib, "": it.text or ""}) for it in ElementTree.fromstring(text).iter()]


def texts(picture: Picture) -> list[str]:
    return [found[""] for tag, found in shapes(picture) if tag == "text"]


def boxes(picture: Picture, style: str) -> list[tuple[float, float, float, float]]:
    found = [each for tag, each in shapes(picture) if tag == "rect" and each.get("class", "").split()[:1] == [style]]
    return [(float(it["x"]), float(it["y"]), float(it["width"]), float(it["height"])) for it in found]


def test_a_command_draws_over_its_own_pictures_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.svg"
    words = ["--world-size", "4", "--picture", str(path)]
    assert [ranks(words), ranks(words)] == [0, 0], capsys.readouterr().err
    of_ranks = path.read_bytes()
    assert schedule(["parallel.pp=2", "train.global_batch_size=16", "--picture", str(path)]) == 2
    assert path.read_bytes() == of_ranks
    assert [each.name for each in tmp_path.iterdir()] == ["a.svg"]


def test_a_text_is_no_markup() -> None:
    picture = Picture("<script>&")
    picture.text(0, 0, "<b>\x1b[31m")
    assert texts(picture) == ["<b>\\x1b[31m"]
    assert "<script" not in picture.svg()


def words_of(picture: Picture) -> list[list[str]]:
    """What stands in the box of each rank."""
    found = shapes(picture)
    starts = [at for at, (_, each) in enumerate(found) if each.get("class", "").startswith("rank c")]
    cut = [found[start + 1 : end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return [[each[""] for _, each in its if each.get("class", "").startswith("mid")] for its in cut]


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "pp-tp-ep-dp-cp"])
def test_each_rank_says_its_group_of_each_axis_that_is_split(order: str) -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=2, pp=3, ep=2, etp=2, order=order)
    words = words_of(ranks_picture(layout, 5))
    assert [its[0] for its in words] == [f"rank {rank}" for rank in range(24)]
    for at, axis in enumerate(("tp", "cp", "dp", "pp", "etp", "ep", "edp"), 1):
        shown = [[rank for rank, its in enumerate(words) if its[at] == f"{axis} {it}"] for it in range(24)]
        assert [group for group in shown if group] == layout.groups(axis)
    assert words_of(ranks_picture(laid_out(1), 8)) == [["rank 0"]]


@pytest.mark.parametrize(("world_size", "gpus_per_node"), [(1, 8), (20, 3), (300, 200)])
def test_every_drawn_rank_has_a_place_of_its_own_in_its_node(world_size: int, gpus_per_node: int) -> None:
    picture = ranks_picture(laid_out(world_size), gpus_per_node)
    nodes, places = boxes(picture, "node"), boxes(picture, "rank")
    assert len({*places}) == len(places) == min(world_size, MOST_RANKS)
    assert len(nodes) == -(-len(places) // gpus_per_node)
    for rank, (x, y, wide, high) in enumerate(places):
        left, top, width, height = nodes[rank // gpus_per_node]
        assert left < x < x + wide < left + width <= picture.width
        assert top < y < y + high <= top + height - GAP < picture.height


@pytest.mark.parametrize(("gpus_per_node", "dp", "pp"), [(8, 0, 8), (12, 4, 4)])
def test_the_groups_that_leave_a_node_are_counted(gpus_per_node: int, dp: int, pp: int) -> None:
    found = texts(ranks_picture(laid_out(16, tp=4, pp=2), gpus_per_node))
    assert found[0] == "16 ranks: tp 4 x dp 2 x pp 2, order tp-cp-ep-dp-pp"
    assert found[1:4] == [
        "tp: 4 groups of 4, 0 across nodes",
        f"dp: 8 groups of 2, {dp} across nodes",
        f"pp: 8 groups of 2, {pp} across nodes",
    ]


def test_a_picture_of_many_ranks_says_what_it_leaves_out_and_one_of_experts_who_holds_them() -> None:
    large = texts(ranks_picture(laid_out(4096, tp=8, pp=4), 8))
    assert "drawn: ranks 0 to 143" in large
    assert "rank 144" not in large
    words = words_of(ranks_picture(laid_out(8, tp=2, ep=4, etp=1), 8, 12))
    assert [its[-1] for its in words] == [f"experts {first}-{first + 2}" for first in (0, 3, 6, 9)] * 2


def timeline(name: str, pp: int, microbatches: int, vpp: int = 1) -> Timeline:
    return simulated(schedule_of(name, pp, microbatches, vpp))


def drawn(line: Timeline, unit: Unit = FORWARD_PASSES) -> Picture:
    return schedule_picture(line, unit, line.title)


INTERLEAVED = (
    timeline("interleaved", 4, 8, vpp=2),
    [5.5, 4.5, 3.5, 2.5],
    "forward, chunks 0-1;backward, chunks 0-1;idle",
)
ZB_H1 = timeline("zb-h1", 4, 8), [4, 4, 4, 4], "forward;backward-input;backward-weight;idle"


@pytest.mark.parametrize(("line", "held", "kinds"), [INTERLEAVED, ZB_H1], ids=["interleaved", "zb-h1"])
def test_ranks_microbatches_bubble_and_what_is_held_are_written(line: Timeline, held: list[float], kinds: str) -> None:
    found = shapes(drawn(line))
    words = [each[""] for tag, each in found if tag == "text"]
    assert len([each for _, each in found if each.get("class", "").startswith("in-box")]) == sum(map(len, line.ranks))
    assert {line.title, line.summary(FORWARD_PASSES), "rank 0", "rank 3"} <= {*words}
    assert [text for text in words if re.fullmatch(r"[\d.]+ microbatches", text)] == [
        f"{it} microbatches" for it in held
    ]
    assert [text for text in words if text in kinds.split(";")] == kinds.split(";")


def test_a_box_stands_where_and_as_long_as_its_action_was() -> None:
    """Also where times are seconds, as a run records them."""
    line = timeline("1f1b", 2, 3)
    seconds = tuple(tuple(Span(one, start / 64, end / 64) for one, start, end in spans) for spans in line.ranks)
    pictures = [drawn(line), drawn(Timeline("1f1b", 1, 3, seconds), ("ticks", 64))]
    assert texts(pictures[0])[2:] == [text.replace("ticks", FORWARD_PASSES[0]) for text in texts(pictures[1])[2:]]
    for picture in pictures:
        ((_, _, wide, _), *_) = rows = boxes(picture, "idle")[:2]
        found = []
        for tag, each in shapes(picture):
            for x, y, width in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v", each.get("d", "")) if tag == "path" else ():
                start = (float(x) - LEFT) / wide * line.makespan
                end = start + float(width) / 0.98 / wide * line.makespan  # with a little room between boxes
                found.append((int(float(y) > rows[1][1] - 1), start, end))
        actions = [(rank, start, end) for rank, spans in enumerate(line.ranks) for _, start, end in spans]
        assert sorted(found) == [pytest.approx(action, abs=0.01) for action in sorted(actions)]


@pytest.mark.parametrize(
    "line",
    [
        timeline("gpipe", 1, 1),
        timeline("interleaved", 3, 5, vpp=4),
        timeline("zb-h1", 100, 3),
        timeline("1f1b", 2, 3000),
        Timeline("1f1b", 1, 0, ((), ())),
    ],
    ids=lambda line: line.title,
)
def test_any_timeline_is_a_picture_of_bounded_size(line: Timeline) -> None:
    picture = drawn(line)
    assert 700 < picture.width < 1400
    assert 100 < picture.height < 30 * len(line.ranks) + 200
    assert shapes(picture)
    assert len(picture.svg()) < 1_000_000

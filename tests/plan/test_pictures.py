"""Pictures show each rank, link and action where it is; files appear whole or not at all."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.commands import ranks, schedule
from megalite.errors.problems import UserError
from megalite.layout.ranks import ParallelLayout
from megalite.pipeline.simulator import Span, equal_durations
from megalite.plan.picture import Picture, picture_problems, save_picture
from megalite.plan.ranks_picture import HIGH, MOST_RANKS, WIDE, panels_of, ranks_picture, title_of
from megalite.plan.ranks_table import held_experts
from megalite.plan.schedule_picture import LEFT, schedule_picture
from megalite.plan.timeline import FORWARD_PASSES, Timeline, Unit, simulated
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


# --- files ---------------------------------------------------------------------------------------------------------

DRAW_ALL = """
import sys
from megalite.commands import ranks, schedule
for command, words in {
    ranks: "--world-size 4 parallel.tp=2",
    schedule: "parallel.pp=2 train.global_batch_size=2 train.micro_batch_size=1",
}.items():
    assert command.main([*words.split(), "--picture", f"{sys.argv[1]}/{command.__name__}.svg"]) == 0
assert "torch" not in sys.modules
"""


def test_equal_pictures_are_equal_files(tmp_path: Path) -> None:
    drawn = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        subprocess.run([sys.executable, "-c", DRAW_ALL, tmp_path / name], check=True)
        drawn.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 2


def test_a_picture_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_space(path: Path, content: bytes) -> None:
        path.write_bytes(content[:9])
        raise OSError(28, "No space left on device")

    old = tmp_path / "ranks.svg"
    save_picture(lambda: Picture("old"), old, "ranks")
    before = old.read_bytes()
    monkeypatch.setattr("megalite.config.durable_files.write_new", run_out_of_space)
    with pytest.raises(UserError, match=r"--picture=.*No space left"):
        save_picture(lambda: Picture("new"), old, "ranks")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("ranks.svg", before)]


def test_files_that_cannot_become_pictures_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    assert picture_problems(tmp_path / "new.svg", "ranks") == []
    for name, rule in (("a.png", "must end in"), ("gone/a.svg", "does not exist"), ("folder.svg", "is a folder")):
        (problem,) = picture_problems(tmp_path / name, "ranks")
        assert rule in problem.rule


def test_a_command_draws_over_its_own_pictures_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.svg"
    words = ["--world-size", "4", "--picture", str(path)]
    assert [ranks.main(words), ranks.main(words)] == [0, 0], capsys.readouterr().err
    by_ranks = path.read_bytes()
    for content, draw in (
        (by_ranks, lambda: schedule.main(["parallel.pp=2", "train.global_batch_size=16", "--picture", str(path)])),
        (b'<?xml version="1.0"?><svg>mine</svg>', lambda: ranks.main(words)),
        (b"", lambda: ranks.main(words)),
    ):
        path.write_bytes(content)
        assert draw() == 2
        assert f"fix: --picture={tmp_path}/a-2.svg" in capsys.readouterr().err
        assert path.read_bytes() == content
    with pytest.raises(UserError, match="holds something else"):  # it came while the picture was drawn
        save_picture(lambda: Picture("title"), path, "ranks")
    assert [each.name for each in tmp_path.iterdir()] == ["a.svg"]


def test_a_text_is_no_markup() -> None:
    picture = Picture("<script>&")
    picture.text(0, 0, "<b>\x1b[31m")
    assert texts(picture) == ["<b>\\x1b[31m"]
    assert "<script" not in picture.svg()


# --- ranks ---------------------------------------------------------------------------------------------------------

size = st.sampled_from([1, 2, 3, 4])
layouts = st.builds(
    lambda etp, ep, edp, pp, order: ParallelLayout(tp=etp, dp=ep * edp, pp=pp, ep=ep, etp=etp, order=order),
    size,
    size,
    size,
    size,
    st.sampled_from(["tp-cp-ep-dp-pp", "pp-tp-ep-dp-cp"]),
)


def panels(gpus_per_node: int = 8, /, **sizes: int) -> dict[str, Picture]:
    found = panels_of(laid_out(**sizes), gpus_per_node)
    return {panel.title.partition(":")[0]: panel for panel in found}


@given(layout=layouts, gpus_per_node=st.integers(1, 20))
@settings(deadline=None, max_examples=40)
def test_links_join_the_members_of_each_group_in_order_and_nobody_else(
    layout: ParallelLayout, gpus_per_node: int
) -> None:
    for panel in panels_of(layout, gpus_per_node):
        if layout.world_size == 1:
            continue
        rank_at = {(x + WIDE / 2, y + HIGH / 2): rank for rank, (x, y, *_) in enumerate(boxes(panel, "rank"))}
        drawn = min(layout.world_size, MOST_RANKS)
        assert len(rank_at) == drawn
        following, colours = dict[int, int | None](), dict[int, str]()
        for tag, found in shapes(panel):
            if tag == "path":
                x, y, line = re.fullmatch(r"M([\d.]+) ([\d.]+)(.*)", found["d"]).groups()  # type: ignore[union-attr]
                start, to = rank_at[float(x), float(y)], line.split()
                end = None if line[0] == "v" else rank_at[float(x) + float(to[2]), float(y) + float(to[3])]
                following[start] = end
                colours[start] = found["class"].split()[1]
                crosses = end is not None and start // gpus_per_node != end // gpus_per_node
                assert end is None or ("dashed" in found["class"]) == crosses
        for group in layout.groups(panel.title.partition(":")[0]):
            shown = [rank for rank in group if rank < drawn]
            hidden = [None] if shown and len(shown) < len(group) else []
            assert [following.pop(rank) for rank in shown if rank in following] == [*shown[1:], *hidden]
            assert len({colours[rank] for rank in shown if rank in colours}) <= 1
        assert not following


@pytest.mark.parametrize(
    ("world_size", "gpus_per_node"), [(1, 8), (3, 8), (30, 8), (5, 1), (20, 3), (300, 200), (300, 8)]
)
def test_every_drawn_rank_has_a_place_of_its_own_in_its_node(world_size: int, gpus_per_node: int) -> None:
    (panel,) = panels_of(laid_out(world_size), gpus_per_node)
    nodes, places = boxes(panel, "node"), boxes(panel, "rank")
    assert len({*places}) == len(places) == min(world_size, MOST_RANKS)
    assert [text for text in texts(panel) if text.isdigit()] == [str(rank) for rank in range(len(places))]
    assert len(nodes) == -(-len(places) // gpus_per_node)
    for rank, (x, y, wide, high) in enumerate(places):
        left, top, width, height = nodes[rank // gpus_per_node]
        assert left < x < x + wide < left + width <= panel.width
        assert top < y < y + high < top + height <= panel.height


INSIDE, CROSS = "inside a node", "8 across nodes"


@pytest.mark.parametrize(
    ("gpus_per_node", "tp", "dp", "pp"),
    [
        (8, INSIDE, INSIDE, CROSS),
        (4, INSIDE, CROSS, CROSS),
        (6, "1 across nodes", "6 across nodes", CROSS),
        (12, INSIDE, "4 across nodes", "4 across nodes"),
        (72, INSIDE, INSIDE, INSIDE),
    ],
)
def test_titles_count_the_groups_that_leave_a_node(gpus_per_node: int, tp: str, dp: str, pp: str) -> None:
    titles = [panel.title for panel in panels(gpus_per_node, world_size=16, tp=4, pp=2).values()]
    assert titles == [f"tp: 4 groups of 4, {tp}", f"dp: 8 groups of 2, {dp}", f"pp: 8 groups of 2, {pp}"]
    assert title_of("dp", [[0, 1, 2]], 8) == "dp: 1 group of 3, inside a node"


def test_panels_are_the_axes_that_are_split_and_the_pipelines_once() -> None:
    assert list(panels(world_size=16, tp=4, pp=2, ep=4, etp=1)) == ["tp", "dp", "pp", "ep", "edp"]
    assert list(panels(world_size=1)) == ["one rank"]


def test_a_picture_of_ranks_says_what_it_shows() -> None:
    found = texts(ranks_picture(laid_out(16, tp=4, pp=2, ep=4, etp=1), 8))
    assert {"16 ranks: tp 4 x dp 2 x pp 2, order tp-cp-ep-dp-pp", "experts: ep 4 x edp 2 x pp 2"} <= {*found}
    assert [found.count(text) for text in ("ep: 4 groups of 4, inside a node", "node 1", "15")] == [1, 5, 5]
    large = texts(ranks_picture(laid_out(4096, tp=8, pp=4), 8))
    assert "pipeline: stages of layers, first to last; drawn: ranks 0 to 143 of 4096" in large
    assert "144" not in large
    layout = laid_out(8, tp=2, ep=4, etp=1)
    experts = texts(ranks_picture(layout, 8, held_experts(layout, 12)))
    assert [experts.count(part) for part in ("0-2", "3-5", "6-8", "9-11")] == [2, 2, 2, 2]
    assert experts[experts.index("6-8") - 1] == "2"


# --- schedules -----------------------------------------------------------------------------------------------------


def timeline(name: str, pp: int, microbatches: int, vpp: int = 1) -> Timeline:
    table = schedule_of(name, pp, microbatches, vpp)
    return simulated(table, equal_durations(table, 1 / vpp, 1 / vpp, 1 / vpp))


def drawn(line: Timeline, unit: Unit = FORWARD_PASSES) -> Picture:
    return schedule_picture(line, unit, line.title)


@pytest.mark.parametrize(
    ("line", "held", "kinds"),
    [
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
    ids=["interleaved", "zb-h1"],
)
def test_ranks_microbatches_bubble_and_what_is_held_are_written(
    line: Timeline, held: list[str], kinds: list[str]
) -> None:
    found = shapes(drawn(line))
    words = [each[""] for tag, each in found if tag == "text"]
    assert len([each for _, each in found if each.get("class", "").startswith("in-box")]) == sum(map(len, line.ranks))
    assert {line.title, line.summary(FORWARD_PASSES), "rank 0", "rank 3"} <= {*words}
    assert [text for text in words if re.fullmatch(r"[\d.]+ microbatch(es)?", text)] == held
    assert [text for text in words if text in kinds] == kinds


def test_a_box_stands_where_and_as_long_as_its_action_was() -> None:
    """Also where times are seconds, as a run records them."""
    line = timeline("1f1b", 2, 3)
    seconds = tuple(tuple(Span(one, start / 64, end / 64) for one, start, end in spans) for spans in line.ranks)
    pictures = [drawn(line), drawn(Timeline("1f1b", 1, 3, seconds), Unit("ticks", 64))]
    assert texts(pictures[0])[2:] == [text.replace("ticks", FORWARD_PASSES.words) for text in texts(pictures[1])[2:]]
    for picture in pictures:
        ((_, _, wide, _), *_) = rows = boxes(picture, "idle")[:2]
        found = []
        for tag, each in shapes(picture):
            for x, y, width in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v", each.get("d", "")) if tag == "path" else ():
                start = (float(x) - LEFT) / wide * line.makespan
                found.append((int(float(y) > rows[1][1] - 1), start, start + float(width) / wide * line.makespan))
        actions = [(rank, start, end) for rank, spans in enumerate(line.ranks) for _, start, end in spans]
        assert sorted(found) == [pytest.approx(action, abs=0.01) for action in sorted(actions)]


def test_schedules_of_one_batch_have_one_scale() -> None:
    lines = [timeline("gpipe", 4, 8), timeline("1f1b", 4, 8), timeline("zb-h1", 4, 8), timeline("interleaved", 4, 8, 2)]
    scales = [boxes(drawn(line), "idle")[0][2] / line.makespan for line in lines]
    assert scales == pytest.approx([scales[0]] * 4, rel=1e-4)


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
    assert 100 < picture.height < 900
    assert shapes(picture)
    assert len(picture.svg()) < 1_000_000

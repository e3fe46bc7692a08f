"""The picture joins exactly the ranks of a group and says what leaves a node."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.layout.panels import FIRST_RANKS, MOST_RANKS, Grid, Panel, panels_of, title_of
from megalite.layout.ranks import ParallelLayout
from megalite.plan.drawing import save_picture
from megalite.plan.ranks_picture import figure_of
from tests.plan.laid_out import laid_out

size = st.sampled_from([1, 2, 3, 4])
layouts = st.builds(
    lambda etp, ep, edp, pp, order: ParallelLayout(tp=etp, dp=ep * edp, pp=pp, ep=ep, etp=etp, order=order),
    size,
    size,
    size,
    size,
    st.sampled_from(["tp-cp-ep-dp-pp", "pp-tp-ep-dp-cp"]),
)
per_node = st.integers(1, 20)


def panels(gpus_per_node: int = 8, /, **sizes: int) -> dict[str, Panel]:
    layout = laid_out(**sizes)
    return {panel.axis: panel for panel in panels_of(layout, Grid(layout.world_size, gpus_per_node))}


@given(layout=layouts, gpus_per_node=per_node)
@settings(deadline=None, max_examples=60)
def test_links_join_the_members_of_each_group_in_order_and_nobody_else(
    layout: ParallelLayout, gpus_per_node: int
) -> None:
    grid = Grid(layout.world_size, gpus_per_node)
    for panel in panels_of(layout, grid):
        following = {link.start: link.end for link in panel.links}
        assert len(following) == len(panel.links)
        for group in layout.groups(panel.axis):
            drawn = [rank for rank in group if rank < grid.drawn]
            hidden = [None] if drawn and len(drawn) < len(group) else []
            assert [following.pop(rank) for rank in drawn if rank in following] == [*drawn[1:], *hidden]
            assert len({panel.colours[rank] for rank in drawn}) <= 1
        assert not following
        assert set(panel.colours) == set(range(grid.drawn))
        for link in panel.links:
            if link.end is not None:
                assert link.crosses == (link.start // gpus_per_node != link.end // gpus_per_node)


@given(world_size=st.integers(1, 300), gpus_per_node=per_node)
@settings(deadline=None)
def test_every_drawn_rank_has_a_place_of_its_own_on_at_most_eight_columns(world_size: int, gpus_per_node: int) -> None:
    grid = Grid(world_size, gpus_per_node)
    places = [grid.place(rank) for rank in range(grid.drawn)]
    assert len(set(places)) == len(places) == grid.drawn
    assert max(column for column, _ in places) < 8
    assert max(line for _, line in places) < grid.lines


INSIDE, CROSS = "all inside a node", "all cross nodes"


@pytest.mark.parametrize(
    ("gpus_per_node", "tp", "dp", "pp"),
    [
        (8, INSIDE, INSIDE, CROSS),
        (4, INSIDE, CROSS, CROSS),
        (6, "3 inside a node, 1 crosses nodes", "2 inside a node, 6 cross nodes", CROSS),
        (12, INSIDE, "4 inside a node, 4 cross nodes", "4 inside a node, 4 cross nodes"),
        (72, INSIDE, INSIDE, INSIDE),
    ],
)
def test_titles_count_the_groups_that_leave_a_node(gpus_per_node: int, tp: str, dp: str, pp: str) -> None:
    titles = [panel.title for panel in panels(gpus_per_node, world_size=16, tp=4, pp=2).values()]
    assert titles == [f"tp: 4 groups of 4, {tp}", f"dp: 8 groups of 2, {dp}", f"pp: 8 groups of 2, {pp}"]


def test_a_single_group_is_told_in_the_singular() -> None:
    assert title_of("dp", [[0, 1, 2]], Grid(3, 8)) == "dp: 1 group of 3, inside a node"
    assert title_of("dp", [[0, 1, 2]], Grid(3, 2)) == "dp: 1 group of 3, crosses nodes"


def test_panels_are_the_axes_that_are_split_and_the_pipelines_once() -> None:
    assert list(panels(world_size=16, tp=4, pp=2, ep=4, etp=1)) == ["tp", "dp", "pp", "ep", "edp"]
    assert list(panels(world_size=1)) == []


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (64, {"tp": 2, "pp": 4}),
        (64, {"tp": 8, "pp": 4}),
        (64, {"tp": 4, "cp": 2, "pp": 2}),
        (64, {"pp": 64}),
        (22, {"pp": 2}),  # groups 10 and 0, whose turns give the same colour, are side by side
    ],
)
def test_ranks_side_by_side_share_a_colour_only_within_a_group(world_size: int, sizes: dict[str, int]) -> None:
    layout = laid_out(world_size, **sizes)
    grid = Grid(world_size, 8)
    rank_at = {grid.place(rank): rank for rank in range(world_size)}
    for axis, panel in panels(world_size=world_size, **sizes).items():
        group_of = {rank: number for number, group in enumerate(layout.groups(axis)) for rank in group}
        for (column, line), rank in rank_at.items():
            for beside in (rank_at.get((column + 1, line)), rank_at.get((column, line + 1))):
                if beside is not None and panel.colours[rank] == panel.colours[beside]:
                    assert group_of[rank] == group_of[beside]


def test_of_a_large_world_the_first_nodes_are_drawn_and_the_picture_says_so(tmp_path: Path) -> None:
    layout = laid_out(4096, tp=8, pp=4)
    save_picture(lambda: figure_of(layout, 8), tmp_path / "large.svg", "--picture")
    texts = texts_of(tmp_path / "large.svg")
    assert "drawn: ranks 0-71 of 4096; the titles count all groups" in texts
    assert "pp: 1024 groups of 4, all cross nodes" in texts
    assert "to a rank that is not drawn" in texts
    assert {"0", "71"} <= set(texts)
    assert "72" not in texts
    assert Grid(MOST_RANKS, 8).drawn == MOST_RANKS
    assert Grid(4096, 1000).drawn == FIRST_RANKS


def test_a_drawing_names_its_nodes_ranks_axes_and_kinds_of_line(tmp_path: Path) -> None:
    save_picture(lambda: figure_of(laid_out(16, tp=4, pp=2, ep=4, etp=1), 8), tmp_path / "ranks.svg", "--picture")
    texts = texts_of(tmp_path / "ranks.svg")
    assert {"16 ranks: tp 4 x dp 2 x pp 2, order tp-cp-ep-dp-pp", "experts: ep 4 x edp 2 x pp 2"} <= set(texts)
    assert "ep: 4 groups of 4, all inside a node" in texts
    assert [text for text in texts if text == "node"] == ["node"] * 10  # 2 nodes in 5 panels
    assert [text for text in texts if text == "15"] == ["15"] * 5
    assert {"inside a node", "between nodes"} <= set(texts)


def test_what_does_not_occur_is_not_in_the_legend(tmp_path: Path) -> None:
    save_picture(lambda: figure_of(laid_out(8, tp=2), 8), tmp_path / "ranks.svg", "--picture")
    texts = texts_of(tmp_path / "ranks.svg")
    assert "inside a node" in texts
    assert not {"between nodes", "to a rank that is not drawn"} & set(texts)


@pytest.mark.parametrize(("world_size", "gpus_per_node"), [(1, 8), (3, 8), (30, 8), (5, 1), (20, 3), (300, 200)])
@pytest.mark.parametrize("name", ["ranks.png", "ranks.SVG"])
def test_any_world_can_be_drawn(world_size: int, gpus_per_node: int, name: str, tmp_path: Path) -> None:
    save_picture(lambda: figure_of(laid_out(world_size), gpus_per_node), tmp_path / name, "--picture")
    begin = (tmp_path / name).read_bytes()[:8]
    assert begin == (b"\x89PNG\r\n\x1a\n" if name.endswith("png") else b"<?xml ve")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def texts_of(path: Path) -> list[str]:
    """All texts of an SVG in their order, a line each."""
    return [text.strip() for text in re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", path.read_text())]

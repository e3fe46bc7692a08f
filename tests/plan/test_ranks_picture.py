"""The picture joins exactly the ranks of a group and says what leaves a node."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.layout.panels import CELL, MOST_RANKS, Grid, Panel, panels_of, title_of
from megalite.layout.ranks import ParallelLayout
from megalite.plan.drawing import save_picture
from megalite.plan.ranks_picture import figure_of
from megalite.plan.ranks_table import held_experts
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
    return {panel.axis: panel for panel in panels_of(layout, gpus_per_node)}


@given(layout=layouts, gpus_per_node=per_node)
@settings(deadline=None)
def test_links_join_the_members_of_each_group_in_order_and_nobody_else(
    layout: ParallelLayout, gpus_per_node: int
) -> None:
    grid = Grid(layout.world_size, gpus_per_node)
    for panel in panels_of(layout, gpus_per_node):
        if panel.axis == "":
            assert layout.world_size == 1
            continue
        following = {link.start: link.end for link in panel.links}
        assert len(following) == len(panel.links)
        for group in layout.groups(panel.axis):
            drawn = [rank for rank in group if rank < grid.drawn]
            hidden = [None] if drawn and len(drawn) < len(group) else []
            assert [following.pop(rank) for rank in drawn if rank in following] == [*drawn[1:], *hidden]
            assert len({panel.colours[rank] for rank in drawn}) <= 1
        assert not following
        assert len(panel.colours) == len(panel.ranks) == grid.drawn
        for link in panel.links:
            if link.end is not None:
                assert link.crosses == (link.start // gpus_per_node != link.end // gpus_per_node)


@given(world_size=st.integers(1, 300), gpus_per_node=per_node)
@settings(deadline=None)
def test_every_drawn_rank_has_a_place_of_its_own_in_its_node(world_size: int, gpus_per_node: int) -> None:
    grid = Grid(world_size, gpus_per_node)
    places = [grid.corner(rank) for rank in range(grid.drawn)]
    assert len(set(places)) == len(places) == grid.drawn
    width, height = grid.node_size
    for rank, (x, y) in enumerate(places):
        left, top = grid.node_corner(rank // gpus_per_node)
        assert left < x < x + CELL[0] < left + width <= grid.size[0]
        assert top < y < y + CELL[1] < top + height <= grid.size[1]


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


def test_a_single_group_is_told_in_the_singular() -> None:
    assert title_of("dp", [[0, 1, 2]], Grid(3, 8)) == "dp: 1 group of 3, inside a node"
    assert title_of("dp", [[0, 1, 2]], Grid(3, 2)) == "dp: 1 group of 3, 1 across nodes"


def test_panels_are_the_axes_that_are_split_and_the_pipelines_once() -> None:
    assert list(panels(world_size=16, tp=4, pp=2, ep=4, etp=1)) == ["tp", "dp", "pp", "ep", "edp"]
    assert list(panels(world_size=1)) == [""]


def test_of_a_large_world_the_first_nodes_are_drawn_and_the_picture_says_so(tmp_path: Path) -> None:
    layout = laid_out(4096, tp=8, pp=4)
    save_picture(lambda: figure_of(layout, 8), tmp_path / "large.svg", "ranks")
    texts = texts_of(tmp_path / "large.svg")
    assert "pipeline: stages of layers, first to last; drawn: ranks 0 to 143 of 4096" in texts
    assert "pp: 1024 groups of 4, 1024 across nodes" in texts
    assert "to a rank that is not drawn" in texts
    assert {"0", "143"} <= set(texts)
    assert "144" not in texts
    assert Grid(MOST_RANKS, 8).drawn == MOST_RANKS
    assert Grid(4096, 1000).drawn == MOST_RANKS


def test_a_drawing_names_its_nodes_ranks_axes_and_kinds_of_line(tmp_path: Path) -> None:
    save_picture(lambda: figure_of(laid_out(16, tp=4, pp=2, ep=4, etp=1), 8), tmp_path / "ranks.svg", "ranks")
    texts = texts_of(tmp_path / "ranks.svg")
    assert {"16 ranks: tp 4 x dp 2 x pp 2, order tp-cp-ep-dp-pp", "experts: ep 4 x edp 2 x pp 2"} <= set(texts)
    assert "ep: 4 groups of 4, inside a node" in texts
    assert [text for text in texts if text == "node"] == ["node"] * 10  # 2 nodes in 5 panels
    assert [text for text in texts if text == "15"] == ["15"] * 5
    assert {"inside a node", "between nodes"} <= set(texts)


def test_the_panel_of_ep_says_which_experts_a_rank_holds(tmp_path: Path) -> None:
    layout = laid_out(8, tp=2, ep=4, etp=1)
    save_picture(lambda: figure_of(layout, 8, held_experts(layout, 12)), tmp_path / "ranks.svg", "ranks")
    texts = texts_of(tmp_path / "ranks.svg")
    assert [texts.count(part) for part in ("0-2", "3-5", "6-8", "9-11")] == [2, 2, 2, 2]
    assert texts[texts.index("6-8") - 1] == "2"


def test_what_does_not_occur_is_not_in_the_legend(tmp_path: Path) -> None:
    save_picture(lambda: figure_of(laid_out(8, tp=2), 8), tmp_path / "ranks.svg", "ranks")
    texts = texts_of(tmp_path / "ranks.svg")
    assert "inside a node" in texts
    assert not {"between nodes", "to a rank that is not drawn"} & set(texts)


@pytest.mark.parametrize(("world_size", "gpus_per_node"), [(1, 8), (3, 8), (30, 8), (5, 1), (20, 3), (300, 200)])
@pytest.mark.parametrize("name", ["ranks.png", "ranks.SVG"])
def test_any_world_can_be_drawn(world_size: int, gpus_per_node: int, name: str, tmp_path: Path) -> None:
    save_picture(lambda: figure_of(laid_out(world_size), gpus_per_node), tmp_path / name, "ranks")
    begin = (tmp_path / name).read_bytes()[:8]
    assert begin == (b"\x89PNG\r\n\x1a\n" if name.endswith("png") else b"<?xml ve")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def texts_of(path: Path) -> list[str]:
    """All texts of an SVG in their order, a line each."""
    return [text.strip() for text in re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", path.read_text())]

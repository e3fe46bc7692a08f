"""Works out the pictures of a layout, a panel for each axis: ranks in their nodes, groups in colours, links in groups.

Ranks fill nodes in order, as launchers place them. A link leads from each member of a group to the next. Lengths are
points from the upper left corner of a panel. The report and plan/ranks_picture.py draw them. No torch import.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megalite.layout.ranks import DENSE_AXES, EXPERT_AXES, ParallelLayout

ACROSS = 8  # ranks on a line
MOST_RANKS = 144  # of a larger world the first are drawn: 18 nodes of 8, two racks of 72
COLOURS = 10
CELL, GAP = (34.0, 24.0), (12.0, 26.0)  # a rank's box, and what is free right of it and above it
PAD, LABEL, BETWEEN = 8.0, 46.0, 12.0  # inside a node's box; for its name; between nodes
MEANING = {
    "tp": "tensor parallel: slices of every layer",
    "cp": "context parallel: parts of every sequence",
    "dp": "data parallel: copies of the model, other data",
    "pp": "pipeline: stages of layers, first to last",
    "etp": "tensor parallel inside an expert",
    "ep": "expert parallel: different experts",
    "edp": "copies of the same experts, other data",
}
Place = tuple[float, float]


class Link(NamedTuple):
    """From one member of a group to the next; `end` is None where that is not drawn.

    `corners`: the ends of a line, or the four points of a cubic Bezier curve that leaves the ranks in between alone.
    """

    start: int
    end: int | None
    crosses: bool  # from one node to another
    corners: tuple[Place, ...]


@dataclass(frozen=True)
class Panel:
    """One axis. `nodes` and `ranks`: the upper left corners of their boxes. `colours`: of each rank's group."""

    axis: str
    title: str
    meaning: str
    size: Place
    node_size: Place
    nodes: list[Place]
    ranks: list[Place]
    colours: list[int]
    links: list[Link]


@dataclass(frozen=True)
class Grid:
    """Nodes of `ranks_per_node` ranks on lines of up to eight ranks; of `world_size` ranks the first are `drawn`."""

    world_size: int
    ranks_per_node: int

    @property
    def drawn(self) -> int:
        return min(self.world_size, MOST_RANKS)

    @property
    def nodes(self) -> int:
        """Nodes that are drawn, the last perhaps in part."""
        return -(-self.drawn // self.ranks_per_node)

    @property
    def node_size(self) -> Place:
        ranks = min(self.ranks_per_node, self.drawn)
        columns, lines = min(ranks, ACROSS), -(-ranks // ACROSS)
        return columns * (CELL[0] + GAP[0]) - GAP[0] + 2 * PAD, lines * (CELL[1] + GAP[1]) + PAD

    @property
    def size(self) -> Place:
        width, height = self.node_size
        return LABEL + width + 2, self.nodes * (height + BETWEEN) - BETWEEN + 2

    def node_corner(self, node: int) -> Place:
        return LABEL + 1, node * (self.node_size[1] + BETWEEN) + 1

    def corner(self, rank: int) -> Place:
        node, at = divmod(rank, self.ranks_per_node)
        line, column = divmod(at, ACROSS)
        left, top = self.node_corner(node)
        return left + PAD + column * (CELL[0] + GAP[0]), top + GAP[1] - 4 + line * (CELL[1] + GAP[1])

    def crosses(self, start: int, end: int) -> bool:
        return start // self.ranks_per_node != end // self.ranks_per_node


def panels_of(layout: ParallelLayout, ranks_per_node: int) -> list[Panel]:
    """A panel for each axis larger than 1, dense axes first; the pipelines, which experts share, once. One of all ranks
    where no axis is split."""
    grid = Grid(layout.world_size, ranks_per_node)
    axes = [*DENSE_AXES, *(axis for axis in EXPERT_AXES if axis != "pp" and layout.has_experts)]
    split = [axis for axis in axes if layout.sizes[axis] > 1]
    panels = [_panel(axis, title_of(axis, groups := layout.groups(axis), grid), groups, grid) for axis in split]
    return panels or [_panel("", "one rank: nothing is split", [[0]], grid)]


def title_of(axis: str, groups: Sequence[Sequence[int]], grid: Grid) -> str:
    """How many groups there are and how many of them leave a node, in words."""
    crossing = sum(grid.crosses(group[0], group[-1]) for group in groups)
    where = f"{crossing} across nodes" if crossing else "inside a node"
    return f"{axis}: {len(groups)} group{'s' if len(groups) > 1 else ''} of {len(groups[0])}, {where}"


def _panel(axis: str, title: str, groups: list[list[int]], grid: Grid) -> Panel:
    part = f"; drawn: ranks 0 to {grid.drawn - 1} of {grid.world_size}" if grid.drawn < grid.world_size else ""
    colours = {rank: number % COLOURS for number, group in enumerate(groups) for rank in group}
    steps = [step for group in groups for step in pairwise(group) if step[0] < grid.drawn]
    return Panel(
        axis,
        title,
        MEANING.get(axis, "") + part,
        grid.size,
        grid.node_size,
        [grid.node_corner(node) for node in range(grid.nodes)],
        [grid.corner(rank) for rank in range(grid.drawn)],
        [colours[rank] for rank in range(grid.drawn)],
        [_link(grid, start, end if end < grid.drawn else None) for start, end in steps],
    )


def _link(grid: Grid, start: int, end: int | None) -> Link:
    x, y = grid.corner(start)
    right, middle, bottom, centre = x + CELL[0], y + CELL[1] / 2, y + CELL[1], x + CELL[0] / 2
    if end is None:
        return Link(start, end, False, ((centre, bottom), (centre, bottom + 8)))
    to_x, to_y = grid.corner(end)
    corners: tuple[Place, ...] = ((right, middle), (to_x, middle))
    if y == to_y and end != start + 1:
        rise = y - min(18.0, 8.0 + (to_x - x) / 23)
        corners = ((x + 22, y), (x + 28, rise), (to_x + 6, rise), (to_x + 12, y))
    elif x == to_x and to_y - y > 2 * CELL[1] + GAP[1]:
        corners = ((right, middle), (right + 9, bottom), (right + 9, to_y), (right, to_y + CELL[1] / 2))
    elif y != to_y:
        bend, to_centre = (bottom + to_y) / 2, to_x + CELL[0] / 2
        corners = ((centre, bottom), (centre, bend), (to_centre, bend), (to_centre, to_y))
    return Link(start, end, grid.crosses(start, end), corners)

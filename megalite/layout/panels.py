"""What a picture of a layout shows, as plain records: where each rank stands, which ranks are joined, in what colour.

Ranks fill nodes in order, as launchers place them. Each axis larger than 1 has a panel; the members of a group are
joined in their order, one link from each to the next. No matplotlib and no torch import.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megalite.layout.ranks import DENSE_AXES, EXPERT_AXES, ParallelLayout

ACROSS = 8  # ranks on a line
MOST_RANKS = 144  # more than this nobody reads: 18 nodes of 8, two racks of 72;
FIRST_RANKS = 72  # of a larger world so many are drawn, which show the pattern as well
COLOURS = 10
MEANING = {
    "tp": "tensor parallel: slices of every layer",
    "cp": "context parallel: parts of every sequence",
    "dp": "data parallel: copies of the model, other data",
    "pp": "pipeline: stages of layers, first to last",
    "etp": "tensor parallel inside an expert",
    "ep": "expert parallel: different experts",
    "edp": "copies of the same experts, other data",
}


@dataclass(frozen=True)
class Grid:
    """Nodes of `gpus_per_node` ranks on lines of up to eight ranks; of `world_size` ranks the first are `drawn`."""

    world_size: int
    gpus_per_node: int

    @property
    def drawn(self) -> int:
        """As many ranks as can be read, whole nodes if possible."""
        if self.world_size <= MOST_RANKS:
            return self.world_size
        return FIRST_RANKS // self.gpus_per_node * self.gpus_per_node or FIRST_RANKS

    @property
    def node_shape(self) -> tuple[int, int]:
        """Columns and lines of a node."""
        ranks = min(self.gpus_per_node, self.drawn)
        return min(ranks, ACROSS), -(-ranks // ACROSS)

    @property
    def nodes_across(self) -> int:
        return min(max(1, ACROSS // self.gpus_per_node), self.nodes)

    @property
    def nodes(self) -> int:
        """Nodes that are drawn, the last perhaps in part."""
        return -(-self.drawn // self.gpus_per_node)

    @property
    def lines(self) -> int:
        return -(-self.nodes // self.nodes_across) * self.node_shape[1]

    def node(self, rank: int) -> int:
        return rank // self.gpus_per_node

    def place(self, rank: int) -> tuple[int, int]:
        """Column and line of a rank."""
        node, at = divmod(rank, self.gpus_per_node)
        down, across = divmod(node, self.nodes_across)
        columns, lines = self.node_shape
        return across * columns + at % ACROSS, down * lines + at // ACROSS


@dataclass(frozen=True)
class Link:
    """One member of a group and the next. An `end` that is not drawn is None."""

    start: int
    end: int | None
    colour: int
    crosses: bool


@dataclass(frozen=True)
class Panel:
    """One axis: its title, the colour (0..9) of each drawn rank, and the links between them."""

    axis: str
    title: str
    colours: dict[int, int]
    links: tuple[Link, ...]


def panels_of(layout: ParallelLayout, grid: Grid) -> list[Panel]:
    """A panel for each axis larger than 1, dense axes first; the pipelines, which experts share, once."""
    assert layout.rank_offset == 0
    axes = [*DENSE_AXES, *(axis for axis in EXPERT_AXES if axis != "pp" and layout.has_experts)]
    split = [axis for axis in axes if dict(layout.generator(axis).sizes)[axis] > 1]
    return [_panel(axis, layout.groups(axis), grid) for axis in split]


def title_of(axis: str, groups: Sequence[Sequence[int]], grid: Grid) -> str:
    """How many groups there are and how many of them stay inside a node, in words."""
    inside = sum(grid.node(group[0]) == grid.node(group[-1]) for group in groups)
    crossing = len(groups) - inside
    if len(groups) == 1:
        what = "inside a node" if inside else "crosses nodes"
        return f"{axis}: 1 group of {len(groups[0])}, {what}"
    if not inside or not crossing:
        what = "all inside a node" if inside else "all cross nodes"
    else:
        what = f"{inside} inside a node, {crossing} cross{'es' if crossing == 1 else ''} nodes"
    return f"{axis}: {len(groups)} groups of {len(groups[0])}, {what}"


def _panel(axis: str, groups: list[list[int]], grid: Grid) -> Panel:
    drawn = [group for group in groups if group[0] < grid.drawn]
    colours = _colours(drawn, grid)
    links = [
        Link(start, end if end < grid.drawn else None, colours[start], grid.node(start) != grid.node(end))
        for group in drawn
        for start, end in pairwise(group)
        if start < grid.drawn
    ]
    return Panel(axis, title_of(axis, groups, grid), colours, tuple(links))


def _colours(groups: list[list[int]], grid: Grid) -> dict[int, int]:
    """By rank: groups take the colours in turn, but pass over those of ranks beside theirs."""
    rank_at = {grid.place(rank): rank for rank in range(grid.drawn)}
    colours: dict[int, int] = {}
    for number, group in enumerate(groups):
        members = [rank for rank in group if rank < grid.drawn]
        beside: set[int | None] = set()
        for column, line in map(grid.place, members):
            around = [(column + right, line + down) for right in (-1, 0, 1) for down in (-1, 0, 1)]
            beside.update(colours.get(rank_at.get(place, -1)) for place in around)
        turn = [(number + step) % COLOURS for step in range(COLOURS)]
        colour = next((colour for colour in turn if colour not in beside), turn[0])
        colours.update(dict.fromkeys(members, colour))
    return colours

"""Draws a layout: ranks as a grid of nodes, one panel per axis, a colour per group, dashes where a node is left."""

from dataclasses import dataclass
from math import dist
from typing import TYPE_CHECKING, Any

from megalite.layout.panels import ACROSS, MEANING, Grid, Link, Panel, panels_of
from megalite.layout.ranks import ParallelLayout
from megalite.layout.summary import header_lines
from megalite.plan.drawing import COLOURS, EDGE, FILL, GREY, INK, legend, mixed, page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELL, GAP = (0.44, 0.32), (0.22, 0.22)  # a rank's box; between two of them
LABEL, PAD, TITLE = 0.42, 0.16, 0.5  # room for a node's name; inside a node's box; above a panel
NARROWEST, STUB = 4.6, 0.11  # what a panel's title needs; a link to a rank that is not drawn
Point = tuple[float, float]


def figure_of(layout: ParallelLayout, gpus_per_node: int) -> "Figure":
    """The whole picture as a matplotlib figure."""
    grid = Grid(layout.world_size, gpus_per_node)
    panels = panels_of(layout, grid)
    texts = header_lines(layout)
    if grid.drawn < grid.world_size:
        texts.append(f"drawn: ranks 0-{grid.drawn - 1} of {grid.world_size}; the titles count all groups")
    links = [link for panel in panels for link in panel.links]
    bulges = [_bulge(grid, link) for link in links]
    room = max((x for x, _ in bulges), default=0), max((y for _, y in bulges), default=0)
    across, down = min(2, max(1, len(panels))), -(-len(panels) // 2) or 1
    wide, high = _Panel(grid, room).size
    figure, axes = page(texts, across * wide, down * high)
    for number, panel in enumerate(panels or [Panel("", "no group of more than one rank", {}, ())]):
        line, column = divmod(number, across)
        arcs = any(_bulge(grid, link)[1] for link in panel.links)
        _Panel(grid, room, (column * wide, (down - line) * high), arcs).draw(axes, panel)
    _legend(figure, links)
    return figure


def _bulge(grid: Grid, link: Link) -> Point:
    """How far a link leaves the straight line, to the right or upwards, to avoid the ranks in between."""
    if link.end is None:
        return 0, 0
    (column, line), (to_column, to_line) = grid.place(link.start), grid.place(link.end)
    columns, lines = to_column - column, to_line - line
    if lines == 0 and columns > 1:
        return 0, 0.1 + 0.03 * columns
    if columns == 0 and lines > 1:
        return min(0.1 + 0.03 * lines, 0.4) * (line % lines + 1) / lines, 0
    return 0, 0


@dataclass(frozen=True)
class _Panel:
    """Where the ranks of one panel stand. `corner` is its upper left one, `room` what the links of all panels need
    beside and above ranks; a panel without arcs leaves half of that below."""

    grid: Grid
    room: Point
    corner: Point = (0, 0)
    arcs: bool = False

    @property
    def pitch(self) -> Point:
        """From a rank to its neighbour on the line, and to the line below."""
        return CELL[0] + GAP[0] + self.room[0], CELL[1] + GAP[1] + self.room[1]

    @property
    def node(self) -> Point:
        """Size of a node's box."""
        columns, lines = self.grid.node_shape
        return columns * self.pitch[0] - GAP[0] + 2 * PAD, lines * self.pitch[1] - GAP[1] + 2 * PAD

    @property
    def size(self) -> Point:
        """With the title and the distance to the next panel."""
        lines = self.grid.lines // self.grid.node_shape[1]
        wide = self.grid.nodes_across * (self.node[0] + LABEL)
        return max(wide, NARROWEST) + 0.4, lines * (self.node[1] + PAD) + TITLE + 0.3

    def node_corner(self, node: int) -> Point:
        """The lower left one of a node's box."""
        down, across = divmod(node, self.grid.nodes_across)
        x = self.corner[0] + LABEL + across * (self.node[0] + LABEL)
        return x, self.corner[1] - TITLE - down * (self.node[1] + PAD) - self.node[1]

    def centre(self, rank: int) -> Point:
        node, at = divmod(rank, self.grid.gpus_per_node)
        line, column = divmod(at, ACROSS)
        left, bottom = self.node_corner(node)
        x = left + PAD + CELL[0] / 2 + column * self.pitch[0]
        above = self.room[1] if self.arcs else self.room[1] / 2
        return x, bottom + self.node[1] - PAD - above - CELL[1] / 2 - line * self.pitch[1]

    def draw(self, axes: "Axes", panel: Panel) -> None:
        left, top = self.corner
        axes.text(left, top, panel.title, va="top", size=10.5, weight="bold", color=INK)
        axes.text(left, top - 0.21, MEANING.get(panel.axis, ""), va="top", size=8.5, color=GREY)
        for node in range(self.grid.nodes):
            x, y = self.node_corner(node)
            _box(axes, (x, y), self.node, FILL, EDGE, 0)
            name = f"node\n{node}"
            axes.text(
                x - 0.07, y + self.node[1] / 2, name, ha="right", va="center", size=7.5, color=GREY, linespacing=1
            )
        for link in panel.links:
            self.link(axes, link)
        for rank in range(self.grid.drawn):
            x, y = self.centre(rank)
            colour = COLOURS[panel.colours[rank]] if rank in panel.colours else EDGE
            _box(axes, (x - CELL[0] / 2, y - CELL[1] / 2), CELL, mixed(colour, "white", 0.72), colour, 3)
            axes.text(x, y, str(rank), ha="center", va="center_baseline", size=9, color=INK, zorder=4)

    def link(self, axes: "Axes", link: Link) -> None:
        from matplotlib.patches import FancyArrowPatch

        colour, (x, y), (right, up) = COLOURS[link.colour], self.centre(link.start), _bulge(self.grid, link)
        if link.end is None:
            bottom = y - CELL[1] / 2
            axes.plot([x, x], [bottom, bottom - STUB], **_look(mixed(colour, "black", 0.35), crosses=False))
            axes.plot(x, bottom - STUB, "o", color=mixed(colour, "black", 0.35), markersize=4)
            return
        to_x, to_y = self.centre(link.end)
        half = CELL[0] / 2 if right else 0, CELL[1] / 2 if up else 0  # a curve leaves from a side, a line from within
        start, end = (x + half[0], y + half[1]), (to_x + half[0], to_y + half[1])
        if y != to_y and x != to_x:  # between two lines of ranks
            start, end = (x, y - CELL[1] / 2), (to_x, to_y + CELL[1] / 2)
        curve = f"arc3,rad={-2 * (right + up) / dist(start, end)}"
        look = _look(mixed(colour, "black", 0.35) if link.crosses else colour, crosses=link.crosses)
        patch = FancyArrowPatch(start, end, connectionstyle=curve, arrowstyle="-", shrinkA=0, shrinkB=0, **look)
        axes.add_patch(patch)


def _look(colour: str, *, crosses: bool) -> dict[str, Any]:
    """Of a link: thin and dashed where it leaves a node."""
    line: dict[str, Any] = {"ls": (0, (3.2, 1.6)), "lw": 1.5} if crosses else {"ls": "solid", "lw": 2.2}
    return {"color": colour, "zorder": 2, **line}


def _box(axes: "Axes", corner: Point, size: Point, fill: str, edge: str, zorder: int) -> None:
    from matplotlib.patches import FancyBboxPatch

    rounded = "round,pad=0,rounding_size=0.07"
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=rounded, facecolor=fill, edgecolor=edge, zorder=zorder))


def _legend(figure: "Figure", links: list[Link]) -> None:
    from matplotlib.lines import Line2D

    kinds = {link.crosses for link in links if link.end is not None}
    names = {False: "inside a node", True: "between nodes"}
    handles = [
        Line2D([], [], label=names[crosses], **_look(GREY, crosses=crosses)) for crosses in names if crosses in kinds
    ]
    if any(link.end is None for link in links):
        handles.append(Line2D([], [], label="to a rank that is not drawn", marker="o", ls="", color=GREY))
    note = "Joined ranks of one colour are one group. With many groups, colours repeat." if links else ""
    legend(figure, handles, note, handlelength=3.5)

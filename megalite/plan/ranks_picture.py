"""Draws a layout: ranks as a grid of nodes, one panel per axis, a colour per group, dashes where a node is left."""

from math import dist
from typing import TYPE_CHECKING, Any, NamedTuple

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
NO_PANEL = Panel("", "no group of more than one rank", {}, ())
Point = tuple[float, float]


class _Sizes(NamedTuple):
    """Of all panels: what their links need beside and above ranks; from a rank to its neighbour on the line, and to the
    line below; a node's box."""

    room: Point
    pitch: Point
    node: Point


def figure_of(layout: ParallelLayout, gpus_per_node: int) -> "Figure":
    """The whole picture as a matplotlib figure."""
    grid = Grid(layout.world_size, gpus_per_node)
    panels = panels_of(layout, grid) or [NO_PANEL]
    texts = header_lines(layout)
    if grid.drawn < grid.world_size:
        texts.append(f"drawn: ranks 0-{grid.drawn - 1} of {grid.world_size}; the titles count all groups")
    links = [link for panel in panels for link in panel.links]
    bulges = [_bulge(grid, link) for link in links] or [(0.0, 0.0)]
    room, (columns, lines) = (max(x for x, _ in bulges), max(y for _, y in bulges)), grid.node_shape
    pitch = CELL[0] + GAP[0] + room[0], CELL[1] + GAP[1] + room[1]
    node = columns * pitch[0] - GAP[0] + 2 * PAD, lines * pitch[1] - GAP[1] + 2 * PAD
    wide = max(grid.nodes_across * (node[0] + LABEL), NARROWEST) + 0.4
    high = grid.lines // lines * (node[1] + PAD) + TITLE + 0.3
    across, down = min(2, len(panels)), -(-len(panels) // 2)
    figure, axes = page(texts, across * wide, down * high)
    for number, panel in enumerate(panels):
        line, column = divmod(number, across)
        _draw(axes, grid, panel, (column * wide, (down - line) * high), _Sizes(room, pitch, node))
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


def _draw(axes: "Axes", grid: Grid, panel: Panel, corner: Point, sizes: _Sizes) -> None:
    """A panel below and to the right of its upper left corner."""
    left, top = corner
    axes.text(left, top, panel.title, va="top", size=10.5, weight="bold", color=INK)
    axes.text(left, top - 0.21, MEANING.get(panel.axis, ""), va="top", size=8.5, color=GREY)
    nodes = []
    for number in range(grid.nodes):
        down, across = divmod(number, grid.nodes_across)
        x = left + LABEL + across * (sizes.node[0] + LABEL)
        y = top - TITLE - down * (sizes.node[1] + PAD) - sizes.node[1]
        nodes.append((x, y))
        _box(axes, (x, y), sizes.node, FILL, EDGE, 0)
        look: dict[str, Any] = {"ha": "right", "va": "center", "size": 7.5, "color": GREY, "linespacing": 1}
        axes.text(x - 0.07, y + sizes.node[1] / 2, f"node\n{number}", **look)
    above = sizes.room[1] if any(_bulge(grid, link)[1] for link in panel.links) else sizes.room[1] / 2
    centres = []
    for rank in range(grid.drawn):
        (x, y), (line, column) = nodes[grid.node(rank)], divmod(rank % grid.gpus_per_node, ACROSS)
        x = x + PAD + CELL[0] / 2 + column * sizes.pitch[0]
        centres.append((x, y + sizes.node[1] - PAD - above - CELL[1] / 2 - line * sizes.pitch[1]))
    for link in panel.links:
        _link(axes, link, centres, _bulge(grid, link))
    for rank, (x, y) in enumerate(centres):
        colour = COLOURS[panel.colours[rank]] if rank in panel.colours else EDGE
        _box(axes, (x - CELL[0] / 2, y - CELL[1] / 2), CELL, mixed(colour, "white", 0.72), colour, 3)
        axes.text(x, y, str(rank), ha="center", va="center_baseline", size=9, color=INK, zorder=4)


def _link(axes: "Axes", link: Link, centres: list[Point], bulge: Point) -> None:
    from matplotlib.patches import FancyArrowPatch

    colour, (x, y), (right, up) = COLOURS[link.colour], centres[link.start], bulge
    if link.crosses or link.end is None:
        colour = mixed(colour, "black", 0.35)
    if link.end is None:
        bottom = y - CELL[1] / 2
        axes.plot([x, x], [bottom, bottom - STUB], **_look(colour, crosses=False))
        axes.plot(x, bottom - STUB, "o", color=colour, markersize=4)
        return
    to_x, to_y = centres[link.end]
    half = CELL[0] / 2 if right else 0, CELL[1] / 2 if up else 0  # a curve leaves from a side, a line from within
    start, end = (x + half[0], y + half[1]), (to_x + half[0], to_y + half[1])
    if y != to_y and x != to_x:  # between two lines of ranks
        start, end = (x, y - CELL[1] / 2), (to_x, to_y + CELL[1] / 2)
    curve = f"arc3,rad={-2 * (right + up) / dist(start, end)}"
    look = _look(colour, crosses=link.crosses)
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=curve, arrowstyle="-", shrinkA=0, shrinkB=0, **look))


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

"""Draws the panels of a layout (layout/panels.py): one per axis, a colour per group, dashes where a node is left."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megalite.layout.panels import CELL, Panel, Place, panels_of
from megalite.layout.ranks import ParallelLayout
from megalite.layout.summary import header_lines
from megalite.plan.drawing import COLOURS, EDGE, FILL, GREY, INK, legend, mixed, page
from megalite.plan.ranks_table import HeldExperts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 76  # of a panel to an inch
NARROWEST, BESIDE, TITLE, BELOW = 350, 30, 38, 23  # a panel; what is free right of it; its title; below it
DASHED = (0, (3.2, 1.6))


def figure_of(layout: ParallelLayout, ranks_per_node: int, held: Sequence[HeldExperts] = ()) -> "Figure":
    """The whole picture as a matplotlib figure. `held`: the experts of a layer, which the panel of ep shows."""
    panels = panels_of(layout, ranks_per_node)
    width, height = max(panels[0].size[0], NARROWEST) + BESIDE, TITLE + panels[0].size[1] + BELOW
    across, down = min(2, len(panels)), -(-len(panels) // 2)
    figure, axes = page(header_lines(layout), across * width / POINTS, down * height / POINTS)
    axes.set(xlim=(0, across * width), ylim=(down * height, 0))
    experts = {rank: str(each) for each in held for rank in each.ranks}
    for number, panel in enumerate(panels):
        below = experts if panel.axis == "ep" else {}
        _draw(axes, panel, number % across * width, number // across * height, below)
    _legend(figure, panels)
    return figure


def _draw(axes: "Axes", panel: Panel, left: float, top: float, below: Mapping[int, str]) -> None:
    """`below`: what to write under the number of each rank, if anything."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    axes.text(left, top, panel.title, va="top", size=10.5, weight="bold", color=INK)
    axes.text(left, top + 16, panel.meaning, va="top", size=8.5, color=GREY)
    top += TITLE
    for number, (x, y) in enumerate(panel.nodes):
        _box(axes, (left + x, top + y), panel.node_size, FILL, EDGE, 0)
        words: dict[str, Any] = {"ha": "right", "va": "center", "size": 7.5, "color": GREY, "linespacing": 1}
        axes.text(left + x - 5, top + y + panel.node_size[1] / 2, f"node\n{number}", **words)
    for link in panel.links:
        colour, corners = COLOURS[panel.colours[link.start]], [(left + x, top + y) for x, y in link.corners]
        curve = [Path.CURVE4] * 3 if len(corners) == 4 else [Path.LINETO]
        look = _look(mixed(colour, "black", 0.35) if link.crosses else colour, crosses=link.crosses)
        axes.add_patch(PathPatch(Path(corners, [Path.MOVETO, *curve]), fill=False, zorder=2, **look))
        if link.end is None:
            axes.plot(*corners[-1], "o", color=colour, markersize=4)
    for rank, (x, y) in enumerate(panel.ranks):
        colour = COLOURS[panel.colours[rank]]
        _box(axes, (left + x, top + y), CELL, mixed(colour, "white", 0.72), colour, 3)
        centre = left + x + CELL[0] / 2, top + y + CELL[1] / 2
        place = (centre[0], centre[1] - 5) if below else centre
        axes.text(*place, str(rank), ha="center", va="center_baseline", size=9, color=INK, zorder=4)
        if below:
            under = (centre[0], centre[1] + 6)
            axes.text(*under, below[rank], ha="center", va="center_baseline", size=6.5, color=INK, zorder=4)


def _look(colour: str, *, crosses: bool) -> dict[str, Any]:
    """Of a link: thin and dashed where it leaves a node."""
    return {"color": colour, "ls": DASHED, "lw": 1.5} if crosses else {"color": colour, "ls": "solid", "lw": 2.2}


def _box(axes: "Axes", corner: Place, size: Place, fill: str, edge: str, zorder: int) -> None:
    from matplotlib.patches import FancyBboxPatch

    rounded = "round,pad=0,rounding_size=5"
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=rounded, facecolor=fill, edgecolor=edge, zorder=zorder))


def _legend(figure: "Figure", panels: list[Panel]) -> None:
    from matplotlib.lines import Line2D

    links = [link for panel in panels for link in panel.links]
    kinds = {link.crosses for link in links if link.end is not None}
    names = {False: "inside a node", True: "between nodes"}
    handles = [Line2D([], [], label=names[it], **_look(GREY, crosses=it)) for it in names if it in kinds]
    if any(link.end is None for link in links):
        handles.append(Line2D([], [], label="to a rank that is not drawn", marker="o", ls="", color=GREY))
    note = "Joined ranks of one colour are one group. With many groups, colours repeat." if links else ""
    legend(figure, handles, note, handlelength=3.5)

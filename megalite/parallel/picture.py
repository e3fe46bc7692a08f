"""Draws a layout: ranks as a grid of nodes, one panel per axis, a colour per group, dashes where a node is left.

Equal layouts give equal files (no time stamps, no settings of the user). All lengths are inches. matplotlib is imported
when a picture is asked for, without pyplot: nothing global changes.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from megalite.config.problems import Problem, UserError
from megalite.parallel.layout import ParallelLayout
from megalite.parallel.panels import ACROSS, MEANING, Grid, Link, Panel, panels_of
from megalite.parallel.tables import header_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
COLOURS = (
    "#3573b9",
    "#e67e22",
    "#2e9e5b",
    "#d64545",
    "#8d5fc0",
    "#8a6248",
    "#df7fb8",
    "#9a9a1f",
    "#22a9b8",
    "#5b6676",
)
LIGHT, DARK = "#ffffff", "#000000"
INK, GREY, NODE_FILL, NODE_EDGE = "#1d2733", "#6a7480", "#f3f4f6", "#c2c8d0"
CELL, LABEL, MARGIN = (0.44, 0.32), 0.42, 0.35  # a rank's box; room for a node's name; around everything
PAD, TITLE, LEGEND = 0.09, 0.52, 0.35  # inside a node's box; above a panel; below all panels
NARROWEST, STUB = 4.3, 0.11  # what a panel's title needs; a link to a rank that is not drawn
Point = tuple[float, float]


def picture_problems(path: FilePath, setting: str) -> list[Problem]:
    """Why no picture can be written to `path`, known before anything is drawn."""
    problems = []
    if path.suffix.lower() not in SUFFIXES:
        problems.append(
            Problem(setting, str(path), "must end in .png or .svg", f"{setting}={path.stem or 'ranks'}.png")
        )
    if path.is_dir():
        problems.append(Problem(setting, str(path), "is a folder", "the name of a file"))
    elif not path.parent.is_dir():
        problems.append(Problem(setting, str(path), f"the folder {path.parent} does not exist", "make it, or another"))
    return problems


def save_picture(layout: ParallelLayout, gpus_per_node: int, path: FilePath, setting: str = "picture") -> None:
    """Draw the layout to a .png or .svg file, which appears only when it is complete."""
    from matplotlib import style

    draft = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    kind = path.suffix.lower().removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else {}
    plain = {"svg.hashsalt": "megalite", "svg.fonttype": "none"}
    try:
        with style.context(["default", plain]):
            figure = figure_of(layout, Grid(layout.world_size, gpus_per_node))
            figure.savefig(draft, format=kind, dpi=150, metadata=metadata)
        draft.replace(path)
    except OSError as error:
        raise UserError(Problem(setting, str(path), f"cannot be written: {error}", "another file")) from error
    finally:
        draft.unlink(missing_ok=True)


def figure_of(layout: ParallelLayout, grid: Grid) -> "Figure":
    """The whole picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    panels = panels_of(layout, grid)
    texts = header_lines(layout)
    if grid.drawn < grid.world_size:
        texts.append(f"drawn: ranks 0-{grid.drawn - 1} of {grid.world_size}; the titles count all groups")
    spacing = _spacing(grid, panels)
    across, down = _arrangement(max(1, len(panels)), spacing)
    wide, high = spacing.panel
    header = 0.3 + 0.2 * len(texts)
    widest = max(across * wide, 0.115 * len(texts[0]), *(0.08 * len(text) for text in texts[1:]))
    size = widest + 2 * MARGIN, header + down * high + LEGEND + 2 * MARGIN
    figure = Figure(figsize=size)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, size[0]), ylim=(0, size[1]))
    axes.set_axis_off()
    axes.text(MARGIN, size[1] - MARGIN, texts[0], va="top", size=13, weight="bold", color=INK)
    for number, text in enumerate(texts[1:]):
        axes.text(MARGIN, size[1] - MARGIN - 0.27 - 0.2 * number, text, va="top", size=9.5, color=GREY)
    for number, panel in enumerate(panels or [Panel("", "no group of more than one rank", {}, ())]):
        line, column = divmod(number, across)
        corner = MARGIN + column * wide, size[1] - MARGIN - header - line * high
        arcs = any(_columns_spanned(grid, link) > 1 for link in panel.links)
        _Brush(axes, grid, spacing, corner, arcs).panel(panel)
    _legend(axes, panels)
    return figure


@dataclass(frozen=True)
class _Spacing:
    """Distances between ranks; lines that pass other ranks get lanes beside them, arcs get room above."""

    grid: Grid
    lanes: int  # vertical links side by side
    arc: float  # height of the highest arc

    @property
    def pitch(self) -> Point:
        """From a rank to its neighbour on the line, and to the line below."""
        return CELL[0] + 0.2 + min(0.07 * self.lanes, 0.5), CELL[1] + 0.2 + self.arc

    @property
    def node(self) -> Point:
        """Size of a node's box."""
        columns, lines = self.grid.node_shape
        return columns * self.pitch[0] + 2 * PAD, lines * self.pitch[1] + 2 * PAD

    @property
    def step(self) -> Point:
        """From a node to the next one on the line, and to the one below."""
        return self.node[0] + LABEL + 0.08, self.node[1] + 0.16

    @property
    def panel(self) -> Point:
        """Size of a panel with its title and the distance to the next one."""
        lines = self.grid.lines // self.grid.node_shape[1]
        width, height = self.step
        return max(self.grid.nodes_across * width, NARROWEST) + 0.35, lines * height + TITLE + 0.3


def _spacing(grid: Grid, panels: Sequence[Panel]) -> _Spacing:
    links = [link for panel in panels for link in panel.links]
    lanes = max((_lines_spanned(grid, link) for link in links), default=0)
    longest = max((_columns_spanned(grid, link) for link in links), default=0)
    return _Spacing(grid, lanes if lanes > 1 else 0, _arc_height(longest))


def _columns_spanned(grid: Grid, link: Link) -> int:
    """Columns between two ranks of one line, else 0."""
    if link.end is None:
        return 0
    (column, line), (end_column, end_line) = grid.place(link.start), grid.place(link.end)
    return end_column - column if line == end_line else 0


def _lines_spanned(grid: Grid, link: Link) -> int:
    """Lines between two ranks of one column, else 0."""
    if link.end is None:
        return 0
    (column, line), (end_column, end_line) = grid.place(link.start), grid.place(link.end)
    return end_line - line if column == end_column else 0


def _arc_height(columns: int) -> float:
    """How far an arc over so many columns rises above the ranks; neighbours are joined by a straight line."""
    return 0.0 if columns < 2 else 0.1 + 0.03 * columns


def _arrangement(panels: int, spacing: _Spacing) -> tuple[int, int]:
    """Columns and lines of panels: near a square, few places empty, and no wider than a page shows legibly."""

    def cost(across: int) -> float:
        down = -(-panels // across)
        ratio = across * spacing.panel[0] / (down * spacing.panel[1] + 1.5)
        return abs(log(ratio)) + 0.5 * (across * down - panels) / panels

    across = min((1, 2), key=cost) if panels > 1 else 1
    return across, -(-panels // across)


@dataclass(frozen=True)
class _Brush:
    """Draws one panel whose upper left corner is at `corner`."""

    axes: "Axes"
    grid: Grid
    spacing: _Spacing
    corner: Point
    arcs: bool  # whether ranks need the room for arcs above them

    def panel(self, panel: Panel) -> None:
        left, top = self.corner
        self.axes.text(left, top, panel.title, va="top", size=10.5, weight="bold", color=INK)
        self.axes.text(left, top - 0.21, MEANING.get(panel.axis, ""), va="top", size=8.5, color=GREY)
        for node in range(self.grid.nodes):
            self._node(node)
        for link in panel.links:
            self._link(link)
        for rank in range(self.grid.drawn):
            self._rank(rank, COLOURS[panel.colours[rank]] if rank in panel.colours else NODE_EDGE)

    def _node_corner(self, node: int) -> Point:
        """Upper left corner of a node's box."""
        down, across = divmod(node, self.grid.nodes_across)
        step = self.spacing.step
        return self.corner[0] + LABEL + across * step[0], self.corner[1] - TITLE - down * step[1]

    def _centre(self, rank: int) -> Point:
        node, at = divmod(rank, self.grid.gpus_per_node)
        line, column = divmod(at, ACROSS)
        left, top = self._node_corner(node)
        pitch = self.spacing.pitch
        x = left + PAD + 0.1 + CELL[0] / 2 + column * pitch[0]
        spare = self.spacing.arc if self.arcs else self.spacing.arc / 2
        return x, top - PAD - 0.1 - spare - CELL[1] / 2 - line * pitch[1]

    def _node(self, node: int) -> None:
        left, top = self._node_corner(node)
        width, height = self.spacing.node
        self._box((left, top - height), (width, height), NODE_FILL, NODE_EDGE, 0.8, zorder=0)
        # Links between nodes on one line pass at the middle or above, so the name stands below them.
        low = self.grid.nodes_across > 1
        y, align = (top - height + 0.02, "bottom") if low else (top - height / 2, "center")
        name = f"node\n{node}"
        self.axes.text(left - 0.07, y, name, ha="right", va=align, size=7.5, color=GREY, linespacing=1, zorder=1)

    def _rank(self, rank: int, colour: str) -> None:
        x, y = self._centre(rank)
        corner = x - CELL[0] / 2, y - CELL[1] / 2
        self._box(corner, CELL, _mixed(colour, LIGHT, 0.72), colour, 1.3, zorder=3)
        self.axes.text(x, y, str(rank), ha="center", va="center_baseline", size=9, color=INK, zorder=4)

    def _box(self, corner: Point, size: Point, fill: str, edge: str, line: float, zorder: int) -> None:
        from matplotlib.patches import FancyBboxPatch

        rounded = "round,pad=0,rounding_size=0.07"
        box = FancyBboxPatch(corner, *size, boxstyle=rounded, facecolor=fill, edgecolor=edge, linewidth=line)
        box.set_zorder(zorder)
        self.axes.add_patch(box)

    def _link(self, link: Link) -> None:
        colour = COLOURS[link.colour]
        if link.end is None:
            x, y = self._centre(link.start)
            _stub(self.axes, (x, y - CELL[1] / 2), (x, y - CELL[1] / 2 - STUB), colour)
        else:
            _stroke(self.axes, self._route(link.start, link.end), colour, crosses=link.crosses)

    def _route(self, start: int, end: int) -> list[Point]:
        """A straight line (2 points) or a curve (4) between two ranks that avoids the ranks in between."""
        (x, y), (to_x, to_y) = self._centre(start), self._centre(end)
        (column, line), (to_column, to_line) = self.grid.place(start), self.grid.place(end)
        half_width, half_height = CELL[0] / 2, CELL[1] / 2
        if line == to_line and to_column - column == 1:
            return [(x + half_width, y), (to_x - half_width, y)]
        if line == to_line:
            top, rise = y + half_height, y + half_height + _arc_height(to_column - column) / 0.75
            return [(x + 0.08, top), (x + 0.18, rise), (to_x - 0.18, rise), (to_x - 0.08, top)]
        if column == to_column and to_line - line > 1:
            span = to_line - line
            lane = (line % span + 1) / span * (self.spacing.pitch[0] - CELL[0] - 0.06) / 0.75
            right = x + half_width
            return [(right, y), (right + lane, y - 0.2), (right + lane, to_y + 0.2), (right, to_y)]
        bottom, top = y - half_height, to_y + half_height
        bend = max((bottom + top) / 2, bottom - 0.35)  # below its own line, above the arcs of the other
        return [(x, bottom), (x, bend), (to_x, bend), (to_x, top)]


def _stroke(axes: "Axes", points: list[Point], colour: str, *, crosses: bool) -> None:
    """A line or a Bezier curve, dark and dashed where it leaves a node."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    codes = [Path.MOVETO, Path.LINETO] if len(points) == 2 else [Path.MOVETO] + [Path.CURVE4] * 3
    drawn = _mixed(colour, DARK, 0.35) if crosses else colour
    dashes = (0, (3.2, 1.6)) if crosses else "solid"
    width = 1.5 if crosses else 2.2
    patch = PathPatch(Path(points, codes), fill=False, edgecolor=drawn, linestyle=dashes, linewidth=width, zorder=2)
    axes.add_patch(patch)


def _stub(axes: "Axes", start: Point, end: Point, colour: str) -> None:
    """The beginning of a link to a rank that is not drawn: a line that ends in a dot."""
    from matplotlib.patches import Circle

    drawn = _mixed(colour, DARK, 0.35)
    _stroke(axes, [start, end], drawn, crosses=False)
    axes.add_patch(Circle(end, 0.028, facecolor=drawn, edgecolor="none", zorder=2))


def _mixed(colour: str, other: str, share: float) -> str:
    """The colour with a `share` of another in it; both as #rrggbb."""
    pairs = [(int(colour[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(one + (two - one) * share):02x}" for one, two in pairs)


def _legend(axes: "Axes", panels: Sequence[Panel]) -> None:
    links = [link for panel in panels for link in panel.links]
    left, y = MARGIN, MARGIN + 0.2
    kinds = {link.crosses for link in links if link.end is not None}
    for crosses, text in ((False, "inside a node"), (True, "between nodes")):
        if crosses in kinds:
            _stroke(axes, [(left, y), (left + 0.5, y)], GREY, crosses=crosses)
            axes.text(left + 0.6, y, text, va="center", size=9, color=INK)
            left += 1.9
    if any(link.end is None for link in links):
        _stub(axes, (left, y), (left + STUB, y), GREY)
        axes.text(left + STUB + 0.1, y, "to a rank that is not drawn", va="center", size=9, color=INK)
    if links:
        text = "Joined ranks of one colour are one group. With many groups, colours repeat."
        axes.text(MARGIN, MARGIN - 0.05, text, va="center", size=8.5, color=GREY)

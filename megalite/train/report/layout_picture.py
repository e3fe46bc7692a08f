"""A layout as inline SVG: nodes with their ranks, a picture per axis, a colour per group, dashes where a node is left.

What is drawn are the records of parallel/panels.py, as in the pictures of scripts/rank_generator.py; here the colours
are the page's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megalite.parallel.layout import ParallelLayout
from megalite.parallel.panels import ACROSS, MEANING, Grid, Link, Panel, panels_of
from megalite.train.report.markup import Markup, number, tag

CELL, GAP = (34.0, 24.0), (12.0, 26.0)  # a rank's box, and what is free right of it and above it
PAD, LABEL, BETWEEN = 8.0, 46.0, 12.0  # inside a node's box; for its name; between nodes
Place = tuple[float, float]


def layout_pictures(layout: ParallelLayout, ranks_per_node: int) -> list[Markup]:
    """A figure for each axis that is larger than 1; one of the lone rank, or of ranks without an axis, otherwise."""
    grid = Grid(layout.world_size, ranks_per_node)
    panels = panels_of(layout, grid) or [Panel("", "one rank: nothing is split", {0: 0}, ())]
    return [_figure(_Sheet(grid), panel) for panel in panels]


def _figure(sheet: "_Sheet", panel: Panel) -> Markup:
    grid = sheet.grid
    drawn = [*sheet.nodes(), *(part for link in panel.links for part in sheet.link(link))]
    drawn += [sheet.rank(rank, panel.colours.get(rank)) for rank in range(grid.drawn)]
    width, height = sheet.size
    left_out = f", drawn: ranks 0 to {grid.drawn - 1} of {grid.world_size}" if grid.drawn < grid.world_size else ""
    picture = tag(
        "svg",
        tag("title", f"{panel.title}{left_out}"),
        *drawn,
        viewBox=f"0 0 {number(width)} {number(height)}",
        style=f"max-width:{number(width)}px",
        role="img",
        class_="layout",
    )
    words = MEANING.get(panel.axis, "")
    return tag("figure", tag("figcaption", tag("b", panel.title), f" {words}{left_out}"), picture)


@dataclass(frozen=True)
class _Sheet:
    """Where ranks and nodes stand."""

    grid: Grid

    @property
    def node_size(self) -> Place:
        columns, lines = self.grid.node_shape
        return columns * (CELL[0] + GAP[0]) - GAP[0] + 2 * PAD, lines * (CELL[1] + GAP[1]) + PAD

    @property
    def size(self) -> Place:
        across = self.grid.nodes_across
        down = -(-self.grid.nodes // across)
        width, height = self.node_size
        return across * (LABEL + width) + 2, down * (height + BETWEEN) - BETWEEN + 2

    def node_corner(self, node: int) -> Place:
        down, across = divmod(node, self.grid.nodes_across)
        width, height = self.node_size
        return LABEL + across * (LABEL + width) + 1, down * (height + BETWEEN) + 1

    def corner(self, rank: int) -> Place:
        node, at = divmod(rank, self.grid.gpus_per_node)
        line, column = divmod(at, ACROSS)
        left, top = self.node_corner(node)
        return left + PAD + column * (CELL[0] + GAP[0]), top + GAP[1] - 4 + line * (CELL[1] + GAP[1])

    def nodes(self) -> Iterator[Markup]:
        width, height = self.node_size
        for node in range(self.grid.nodes):
            left, top = self.node_corner(node)
            yield tag("rect", x=left, y=top, width=width, height=height, rx=6, class_="node")
            yield tag("text", f"node {node}", x=left - 6, y=top + height / 2 + 4, class_="end")

    def rank(self, rank: int, colour: int | None) -> Markup:
        left, top = self.corner(rank)
        box = tag(
            "rect",
            x=left,
            y=top,
            width=CELL[0],
            height=CELL[1],
            rx=5,
            class_="rank" if colour is None else f"rank r{colour}",
        )
        return tag("g", box, tag("text", str(rank), x=left + CELL[0] / 2, y=top + 16, class_="mid strong"))

    def link(self, link: Link) -> Iterator[Markup]:
        style = f"link s{link.colour}" + (" dashed" if link.crosses else "")
        if link.end is None:
            x, y = self.corner(link.start)
            yield tag("path", d=f"M{number(x + CELL[0] / 2)} {number(y + CELL[1])}v7", class_=style)
            yield tag("circle", cx=x + CELL[0] / 2, cy=y + CELL[1] + 8, r=2.2, class_=f"f{link.colour}")
            return
        yield tag("path", d=self._route(link.start, link.end), class_=style)

    def _route(self, start: int, end: int) -> str:
        """A straight line between neighbours, else a curve that leaves the ranks in between alone."""
        (x, y), (to_x, to_y) = self.corner(start), self.corner(end)
        (column, line), (to_column, to_line) = self.grid.place(start), self.grid.place(end)
        middle = CELL[1] / 2
        if line == to_line and to_column - column == 1:
            return f"M{number(x + CELL[0])} {number(y + middle)}H{number(to_x)}"
        if line == to_line:
            rise = y - min(18.0, 8.0 + 2.0 * (to_column - column))
            return _curve((x + 22, y), (x + 28, rise), (to_x + 6, rise), (to_x + 12, y))
        if column == to_column and to_line - line > 1:
            side = x + CELL[0]
            bulge = side + 9.0
            return _curve((side, y + middle), (bulge, y + 2 * middle), (bulge, to_y), (side, to_y + middle))
        bottom, centre, to_centre = y + CELL[1], x + CELL[0] / 2, to_x + CELL[0] / 2
        bend = (bottom + to_y) / 2
        return _curve((centre, bottom), (centre, bend), (to_centre, bend), (to_centre, to_y))


def _curve(start: Place, first: Place, second: Place, end: Place) -> str:
    """A cubic Bezier curve."""
    written = [f"{number(x)} {number(y)}" for x, y in (start, first, second, end)]
    return f"M{written[0]}C{written[1]} {written[2]} {written[3]}"

"""Works out the pictures of a layout: nodes with their ranks, one picture per axis, one colour per group.

layout/panels.py says which ranks are joined; here each node, rank and link gets its place. macros.html draws them.
"""

from dataclasses import dataclass

from megalite.layout.panels import ACROSS, MEANING, Grid, Link, Panel, panels_of
from megalite.layout.ranks import ParallelLayout

CELL, GAP = (34.0, 24.0), (12.0, 26.0)  # a rank's box, and what is free right of it and above it
PAD, LABEL, BETWEEN = 8.0, 46.0, 12.0  # inside a node's box; for its name; between nodes
Place = tuple[float, float]


@dataclass(frozen=True)
class Picture:
    """One axis of a layout: the corners of nodes and ranks, the links between ranks."""

    title: str
    meaning: str
    size: Place
    node_size: Place
    nodes: list[Place]
    ranks: list[tuple[Place, int | None]]  # with the colour of its group, None without one
    links: list[tuple[Link, str, Place | None]]  # with its path, and a dot where the next rank is not drawn


def layout_pictures(layout: ParallelLayout, ranks_per_node: int) -> list[Picture]:
    """A picture for each axis larger than 1, or one of all ranks where no axis is."""
    grid = Grid(layout.world_size, ranks_per_node)
    panels = panels_of(layout, grid) or [Panel("", "one rank: nothing is split", {0: 0}, ())]
    return [_picture(grid, panel) for panel in panels]


def _picture(grid: Grid, panel: Panel) -> Picture:
    left_out = f", drawn: ranks 0 to {grid.drawn - 1} of {grid.world_size}" if grid.drawn < grid.world_size else ""
    (width, height), across = _node_size(grid), grid.nodes_across
    return Picture(
        panel.title + left_out,
        MEANING.get(panel.axis, ""),
        (across * (LABEL + width) + 2, -(-grid.nodes // across) * (height + BETWEEN) - BETWEEN + 2),
        (width, height),
        [_node_corner(grid, node) for node in range(grid.nodes)],
        [(_corner(grid, rank), panel.colours.get(rank)) for rank in range(grid.drawn)],
        [(link, *_path(grid, link)) for link in panel.links],
    )


def _node_size(grid: Grid) -> Place:
    columns, lines = grid.node_shape
    return columns * (CELL[0] + GAP[0]) - GAP[0] + 2 * PAD, lines * (CELL[1] + GAP[1]) + PAD


def _node_corner(grid: Grid, node: int) -> Place:
    down, across = divmod(node, grid.nodes_across)
    width, height = _node_size(grid)
    return LABEL + across * (LABEL + width) + 1, down * (height + BETWEEN) + 1


def _corner(grid: Grid, rank: int) -> Place:
    """Left and top of a rank's box."""
    node, at = divmod(rank, grid.gpus_per_node)
    line, column = divmod(at, ACROSS)
    left, top = _node_corner(grid, node)
    return left + PAD + column * (CELL[0] + GAP[0]), top + GAP[1] - 4 + line * (CELL[1] + GAP[1])


def _path(grid: Grid, link: Link) -> tuple[str, Place | None]:
    """A straight line between neighbours, else a curve that leaves the ranks in between alone."""
    x, y = _corner(grid, link.start)
    right, middle, bottom, centre = x + CELL[0], y + CELL[1] / 2, y + CELL[1], x + CELL[0] / 2
    if link.end is None:
        return f"M{centre} {bottom}v7", (centre, bottom + 8)
    to_x, to_y = _corner(grid, link.end)
    (column, line), (to_column, to_line) = grid.place(link.start), grid.place(link.end)
    if line == to_line and to_column - column == 1:
        return f"M{right} {middle}H{to_x}", None
    if line == to_line:
        rise = y - min(18.0, 8.0 + 2.0 * (to_column - column))
        return f"M{x + 22} {y}C{x + 28} {rise} {to_x + 6} {rise} {to_x + 12} {y}", None
    if column == to_column and to_line - line > 1:
        return f"M{right} {middle}C{right + 9} {bottom} {right + 9} {to_y} {right} {to_y + CELL[1] / 2}", None
    bend, to_centre = (bottom + to_y) / 2, to_x + CELL[0] / 2
    return f"M{centre} {bottom}C{centre} {bend} {to_centre} {bend} {to_centre} {to_y}", None

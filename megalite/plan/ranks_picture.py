"""Draws a layout, a panel for each axis: ranks in their nodes, a colour per group, links from each member to the next.

Ranks fill nodes in order, as launchers place them. Links that leave a node are dashed.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from megalite.layout.ranks import DENSE_AXES, EXPERT_AXES, ParallelLayout
from megalite.layout.summary import header_lines
from megalite.plan.picture import Picture
from megalite.plan.ranks_table import HeldExperts

ACROSS = 8  # ranks on a line
MOST_RANKS = 144  # of a larger world the first are drawn: 18 nodes of 8, two racks of 72
COLOURS = 10
WIDE, HIGH, RIGHT, ABOVE = 38, 28, 12, 26  # a rank's box, and what is free right of it and above it
LEFT, TOP, BETWEEN, NARROWEST = 56, 44, 12, 380  # for the name of a node; for titles; between nodes; a panel
NEAR, BEND = 90, 46  # links of up to this length are straight; how far others bend
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
NOTE = "Joined ranks of one colour are one group. With many groups, colours repeat. Dashed links lead to another node."


def ranks_picture(layout: ParallelLayout, ranks_per_node: int, held: Sequence[HeldExperts] = ()) -> Picture:
    """All panels under the sizes of the layout. `held`: the experts of a layer, which the panel of ep shows."""
    picture, lines = Picture("ranks of a layout"), header_lines(layout)
    for number, line in enumerate(lines):
        picture.text(0, 14 + 18 * number, line, "" if number else "title")
    top, panels = 16.0 + 18 * len(lines), panels_of(layout, ranks_per_node, held)
    across, wide, high = min(2, len(panels)), panels[0].width + 24, panels[0].height + 24
    for number, panel in enumerate(panels):
        picture.place(panel, number % across * wide, top + number // across * high)
    picture.height = top + -(-len(panels) // across) * high + 8
    picture.text(0, picture.height - 4, NOTE)
    picture.width = max(across * wide - 24, 6.4 * max(map(len, [NOTE, *lines])))
    return picture


def panels_of(layout: ParallelLayout, ranks_per_node: int, held: Sequence[HeldExperts] = ()) -> list[Picture]:
    """A panel for each axis larger than 1, dense axes first; the pipelines, which experts share, once. One of all ranks
    where no axis is split."""
    axes = [*DENSE_AXES, *(axis for axis in EXPERT_AXES if axis != "pp" and layout.has_experts)]
    experts = {rank: str(each) for each in held for rank in each.ranks}
    split = [axis for axis in axes if layout.sizes[axis] > 1]
    panels = [_panel(axis, layout.groups(axis), ranks_per_node, experts if axis == "ep" else {}) for axis in split]
    return panels or [_panel("", [[0]], ranks_per_node, {})]


def title_of(axis: str, groups: Sequence[Sequence[int]], ranks_per_node: int) -> str:
    """How many groups there are and how many of them leave a node, in words."""
    if not axis:
        return "one rank: nothing is split"
    crossing = sum(group[0] // ranks_per_node != group[-1] // ranks_per_node for group in groups)
    where = f"{crossing} across nodes" if crossing else "inside a node"
    return f"{axis}: {len(groups)} group{'s' if len(groups) > 1 else ''} of {len(groups[0])}, {where}"


def _panel(axis: str, groups: list[list[int]], ranks_per_node: int, below: Mapping[int, str]) -> Picture:
    """`below`: what to write under the number of each rank, if anything."""
    world = len(groups) * len(groups[0])
    drawn, in_node = min(world, MOST_RANKS), min(ranks_per_node, world, MOST_RANKS)
    wide = min(in_node, ACROSS) * (WIDE + RIGHT) - RIGHT + 16
    high = -(-in_node // ACROSS) * (HIGH + ABOVE) + 8
    picture = Picture(title_of(axis, groups, ranks_per_node))
    picture.text(0, 14, picture.title, "strong")
    part = f"; drawn: ranks 0 to {drawn - 1} of {world}" if drawn < world else ""
    picture.text(0, 31, MEANING.get(axis, "") + part)
    corners = list[Place]()
    for node in range(-(-drawn // in_node)):
        top = TOP + node * (high + BETWEEN)
        picture.rect(LEFT, top, wide, high, "node")
        picture.text(LEFT - 8, top + high / 2 + 4, f"node {node}", "end")
        for at in range(min(in_node, drawn - node * in_node)):
            line, column = divmod(at, ACROSS)
            corners.append((LEFT + 8 + column * (WIDE + RIGHT), top + ABOVE - 4 + line * (HIGH + ABOVE)))
        picture.width, picture.height = max(LEFT + wide + 2, NARROWEST), top + high + 2
    colours = {rank: number % COLOURS for number, group in enumerate(groups) for rank in group}
    for start, end in (step for group in groups for step in pairwise(group) if step[0] < drawn):
        dashed = " dashed" if start // in_node != end // in_node else ""
        picture.path(_link(corners[start], corners[end] if end < drawn else None), f"link c{colours[start]}{dashed}")
    for rank, (x, y) in enumerate(corners):
        picture.rect(x, y, WIDE, HIGH, f"rank c{colours[rank]}")
        picture.text(x + WIDE / 2, y + (13 if below else 18), str(rank), "mid strong")
        if below:
            picture.text(x + WIDE / 2, y + 24, below[rank], "mid small")
    return picture


def _link(start: Place, end: Place | None) -> str:
    """A line between the middles of boxes, bent where others are in between; a stub where the end is not drawn."""
    x, y = start[0] + WIDE / 2, start[1] + HIGH / 2
    if end is None:
        return f"M{x} {y}v{HIGH / 2 + 9}"
    right, down = end[0] - start[0], end[1] - start[1]
    distance = math.hypot(right, down)
    bend = BEND / distance if distance > NEAR else 0.0
    return f"M{x} {y}q{right / 2 + bend * down:.4g} {down / 2 - bend * right:.4g} {right} {down}"

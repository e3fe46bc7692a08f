"""Draws who computes which scores of a sequence in which step of its ring, from the plans that the ranks follow.

A square for each piece of queries (rows) and of keys (columns): the colour is the rank's that computes it, the number
the step in which the keys are there. Step 0 is the rank's own block.
"""

from typing import TYPE_CHECKING

from megalite.layout.sequence import SequenceShare, block_places, causal_plan
from megalite.plan.drawing import COLOURS, GREY, INK, legend, mixed, page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SQUARE = 0.42  # inches


def steps_of(ring: int) -> dict[tuple[int, int], tuple[int, int]]:
    """By piece of queries and of keys, of 2 * ring each: which block computes it, and in which step."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    pieces = [
        [place for each in block_places(2 * ring, ring, block, "zigzag") for place in each] for block in range(ring)
    ]
    for own in range(ring):
        plan = causal_plan(SequenceShare(own, ring), 2 * ring)  # pieces of one token
        for source, tiles in enumerate(plan.tiles):
            for tile in tiles:
                for row in range(*tile.queries):
                    for column in range(*tile.keys):
                        if not tile.causal or column - tile.keys[0] <= row - tile.queries[0]:
                            found[pieces[own][row], pieces[source][column]] = own, (own - source) % ring
    return found


def figure_of(ring: int, title: str) -> "Figure":
    """The whole picture as a matplotlib figure."""
    from matplotlib.patches import Patch, Rectangle

    pieces = 2 * ring
    about = "rows: pieces of queries; columns: pieces of keys; the number is the step in which the keys are there"
    figure, axes = page([title, about], pieces * SQUARE, pieces * SQUARE, beside=(0.9, 0.2), below=0.9)
    axes.set(xlim=(0, pieces), ylim=(pieces, 0))
    steps = steps_of(ring)
    for (row, column), (block, step) in steps.items():
        colour = COLOURS[block % len(COLOURS)]
        corner = (column, row)
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=mixed(colour, "white", 0.55), edgecolor="white"))
        if row == column:  # above the diagonal, keys lie behind the query
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=colour, hatch="///", linewidth=0))
        axes.text(column + 0.5, row + 0.5, str(step), ha="center", va="center_baseline", size=9, color=INK)
    for piece in range(pieces):
        holder, _ = steps[piece, piece]
        axes.text(-0.15, piece + 0.5, f"piece {piece}, block {holder}", ha="right", va="center", size=7, color=GREY)
    blocks = [Patch(label=f"block {block}", facecolor=COLOURS[block % len(COLOURS)]) for block in range(ring)]
    legend(figure, blocks[:8], "Hatched: half of it counts.")
    return figure

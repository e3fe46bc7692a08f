"""A loss curve as lines of text: the smoothed training loss in braille dots, validation points as circles over it.

A braille character holds 2 x 4 dots, so a curve 60 characters wide has 120 columns.
"""

import math
from collections.abc import Sequence

import numpy as np

Point = tuple[float, float]  # step, finite loss

# Bits of a braille character by (row, column) of the dot, from Unicode's table U+2800.
_DOTS = np.array(((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)))


def draw_curve(train: Sequence[Point], validation: Sequence[Point], *, width: int = 64, height: int = 10) -> list[str]:
    """The lines of a picture `width` x `height` characters with labelled axes, about 10 columns and 2 lines more.

    Nothing to draw gives no lines.
    """
    line = smoothed(train, window=max(1, len(train) // 40))
    if not (points := [*line, *validation]):
        return []
    (first, last), (low, high) = ((min(its), max(its)) for its in zip(*points, strict=True))

    def row_of(loss: float, rows: int) -> int:
        """The row from above; the middle where all losses agree."""
        share = (loss - low) / (high - low) if high > low else 0.5 - 0.5 / rows
        return rows - 1 - min(int(share * rows), rows - 1)

    dots = np.zeros((4 * height, 2 * width), dtype=bool)
    columns, before = np.linspace(first, last, 2 * width), None
    known = np.array(line or [(math.inf, 0.0)], dtype=float).T
    for column, loss in enumerate(np.interp(columns, *known).tolist()):
        if known[0][0] <= columns[column] <= known[0][-1]:
            row = row_of(loss, 4 * height)
            before = row if before is None else before
            dots[min(row, before) : max(row, before) + 1, column] = True  # no gap between two rows
            before = row
    bits = (dots.reshape(height, 4, width, 2) * _DOTS[:, None, :]).sum(axis=(1, 3))
    cells = [[chr(0x2800 + it) if it else " " for it in row] for row in bits]
    for step, loss in validation:
        column = int((step - first) / (last - first) * width) if last > first else width // 2
        cells[row_of(loss, height)][min(column, width - 1)] = "●"
    digits = 2 if high - low > 0.1 else 4
    labels = {0: f"{high:.{digits}f}", height - 1: f"{low:.{digits}f}"}
    rows = [f"{labels.get(at, ''):>8} {'┤' if at in labels else '│'}{''.join(row)}" for at, row in enumerate(cells)]
    left, right = f"{first:.0f}", f"{last:.0f}"
    frame = [f"{'':8} └{'─' * width}", f"{'':10}{left}{right:>{width - len(left)}}"]
    return [*(row.rstrip() for row in rows), *frame]


def smoothed(points: Sequence[Point], *, window: int) -> list[Point]:
    """Mean of each point and up to window // 2 neighbours on either side, as many on both: the ends stay in place."""
    sums = np.cumsum([0.0, *(loss for _, loss in points)])
    result = []
    for at, (step, _) in enumerate(points):
        reach = min(window // 2, at, len(points) - 1 - at)
        result.append((step, float(sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)))
    return result

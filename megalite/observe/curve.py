"""A loss curve as lines of text: the smoothed training loss in braille dots, validation points as circles over it.

A braille character holds 2 x 4 dots, so a curve 60 characters wide has 120 columns.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
    steps, losses = np.array(points, dtype=float).T
    dots = np.zeros((height, 4, width, 2), dtype=bool)
    if line:
        columns = np.linspace(steps.min(), steps.max(), 2 * width)
        known_steps, known_losses = np.array(line, dtype=float).T
        values = np.interp(columns, known_steps, known_losses, left=np.nan, right=np.nan)
        known = np.flatnonzero(~np.isnan(values))
        rows = 4 * height - 1 - _cells(values[known], losses, 4 * height)
        for column, row, before in zip(known, rows, [*rows[:1], *rows], strict=False):  # no gap between two rows
            dots.reshape(4 * height, 2 * width)[min(row, before) : max(row, before) + 1, column] = True
    cells = [[chr(0x2800 + it) if it else " " for it in row] for row in (dots * _DOTS[:, None, :]).sum(axis=(1, 3))]
    at = zip(_cells(losses[len(line) :], losses, height), _cells(steps[len(line) :], steps, width), strict=True)
    for row, column in at:
        cells[height - 1 - row][column] = "●"
    return _framed(["".join(row) for row in cells], losses, steps)


def smoothed(points: Sequence[Point], *, window: int) -> list[Point]:
    """Mean of each point and up to window // 2 neighbours on either side, as many on both: the ends stay in place."""
    sums = np.cumsum([0.0, *(loss for _, loss in points)])
    result = []
    for at, (step, _) in enumerate(points):
        reach = min(window // 2, at, len(points) - 1 - at)
        result.append((step, float(sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)))
    return result


def _cells(places: NDArray[np.float64], values: NDArray[np.float64], cells: int) -> NDArray[np.int64]:
    """The cells of these places among those between the least and the greatest of `values`; the middle where these
    agree."""
    low, high = values.min(), values.max()
    shares = (places - low) / (high - low) if high > low else np.full(len(places), 0.5 - 0.5 / cells)
    found: NDArray[np.int64] = np.minimum(shares * cells, cells - 1).astype(np.int64)
    return found


def _framed(rows: Sequence[str], losses: NDArray[np.float64], steps: NDArray[np.float64]) -> list[str]:
    """Axes: the highest and lowest loss on the left, first and last step below."""
    low, high = losses.min(), losses.max()
    digits = 2 if high - low > 0.1 else 4
    labels = {0: f"{high:.{digits}f}", len(rows) - 1: f"{low:.{digits}f}"}
    lines = [f"{labels.get(at, ''):>8} {'┤' if at in labels else '│'}{row}".rstrip() for at, row in enumerate(rows)]
    first, last = f"{steps.min():.0f}", f"{steps.max():.0f}"
    return [*lines, f"{'':8} └{'─' * len(rows[0])}", f"{'':10}{first}{last:>{len(rows[0]) - len(first)}}"]

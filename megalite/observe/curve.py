"""A loss curve as lines of text: the smoothed training loss in braille dots, validation points as circles over it.

A braille character holds 2 x 4 dots, so a curve 60 characters wide has 120 columns.
"""

from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, float]  # step, finite loss

# Bits of a braille character by (row, column) of the dot, from Unicode's table U+2800.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def draw_curve(train: Sequence[Point], validation: Sequence[Point], *, width: int = 64, height: int = 10) -> list[str]:
    """The lines of a picture `width` x `height` characters with labelled axes, about 10 columns and 2 lines more.

    Nothing to draw gives no lines.
    """
    line = smoothed(train, window=max(1, len(train) // 40))
    if not (points := [*line, *validation]):
        return []
    steps, losses = ([float(value) for value in values] for values in zip(*points, strict=True))
    columns, rows = 2 * width, 4 * height
    corners: dict[int, list[float]] = {}  # losses by column of dots
    for step, loss in line:
        corners.setdefault(_cell(step, steps, columns), []).append(loss)
    means = [(column, rows - 1 - _cell(sum(it) / len(it), losses, rows)) for column, it in sorted(corners.items())]
    bits = [[0] * width for _ in range(height)]
    for column, row in _joined(means):
        bits[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    cells = [[chr(0x2800 + it) if it else " " for it in row] for row in bits]
    for step, loss in validation:
        cells[height - 1 - _cell(loss, losses, height)][_cell(step, steps, width)] = "●"
    return _framed(["".join(row) for row in cells], losses, steps)


def smoothed(points: Sequence[Point], *, window: int) -> list[Point]:
    """Mean of each point and up to window // 2 neighbours on either side, as many on both: the ends stay in place."""
    sums = [0.0]
    for _, loss in points:
        sums.append(sums[-1] + loss)
    result = []
    for at, (step, _) in enumerate(points):
        reach = min(window // 2, at, len(points) - 1 - at)
        result.append((step, (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)))
    return result


def _cell(value: float, values: Sequence[float], cells: int) -> int:
    """The cell of a value among those between the least and the greatest of `values`; the middle where these agree."""
    low, high = min(values), max(values)
    return min(cells - 1, int((value - low) / (high - low) * cells)) if high > low else (cells - 1) // 2


def _joined(corners: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """The dots (column, row from the top) of a line through all corners."""
    dots = set(corners)
    for (left, start), (right, end) in pairwise(corners):
        for column in range(left, right):
            here, there = (start + (end - start) * (at - left) / (right - left) for at in (column, column + 1))
            dots.update((column, row) for row in range(round(min(here, there)), round(max(here, there)) + 1))
    return dots


def _framed(rows: Sequence[str], losses: Sequence[float], steps: Sequence[float]) -> list[str]:
    """Axes: the highest, middle and lowest loss on the left, first and last step below."""
    height, width, low, high = len(rows), len(rows[0]), min(losses), max(losses)
    middle = height // 2
    labels = {middle: low + (1 - (middle + 0.5) / height) * (high - low), 0: high, height - 1: low}
    if high == low:
        labels = {height - 1 - _cell(low, losses, height): low}
    lines = []
    for at, row in enumerate(rows):
        label, edge = (f"{labels[at]:.{2 if high - low > 0.1 else 4}f}", "┤") if at in labels else ("", "│")
        lines.append(f"{label:>8} {edge}{row}".rstrip())
    lines.append(f"{'':8} └{'─' * width}")
    first, last = str(round(min(steps))), str(round(max(steps)))
    lines.append(f"{'':10}{first}{last:>{width - len(first)}}")
    return lines

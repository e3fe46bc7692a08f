"""A loss curve as lines of text: the smoothed training loss in braille dots, validation points as circles over it.

Pure: the same points give the same lines. A braille character holds 2 x 4 dots, so a curve 60 characters wide has 120
columns. Points that are not finite leave a gap.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

Point = tuple[int, float]  # step, loss

# Bits of a braille character by (row, column) of the dot, from Unicode's table U+2800.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def draw_curve(
    train: Sequence[Point], validation: Sequence[Point], *, width: int = 64, height: int = 10, plain: bool = False
) -> list[str]:
    """The lines of a picture `width` x `height` characters with labelled axes, about 10 columns and 2 lines more.

    `plain` uses ASCII alone. Nothing finite to draw gives no lines.
    """
    line = smoothed(finite(train), window=max(1, len(train) // 40))
    points = finite(validation)
    steps = [step for step, _ in line + points]
    losses = [loss for _, loss in line + points]
    if not steps:
        return []
    horizontal = _Scale(min(steps), max(steps))
    vertical = _Scale(min(losses), max(losses))
    columns, rows = (width, height) if plain else (2 * width, 4 * height)
    dots = _trace(line, horizontal, vertical, columns, rows)
    cells = [[_cell(dots, column, row, plain) for column in range(width)] for row in range(height)]
    for step, loss in points:
        cells[height - 1 - vertical.cell(loss, height)][horizontal.cell(step, width)] = "o" if plain else "●"
    return _framed(cells, horizontal, vertical, plain)


def finite(points: Sequence[Point]) -> list[Point]:
    """The points whose loss is a number."""
    return [(step, loss) for step, loss in points if math.isfinite(loss)]


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


class _Scale:
    """Maps values from [low, high] to cells; a single value lies in the middle."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def cell(self, value: float, cells: int) -> int:
        if self.high == self.low:
            return (cells - 1) // 2
        return min(cells - 1, int((value - self.low) / (self.high - self.low) * cells))

    def value(self, share: float) -> float:
        return self.low + share * (self.high - self.low)


def _trace(
    line: Sequence[Point], horizontal: _Scale, vertical: _Scale, columns: int, rows: int
) -> set[tuple[int, int]]:
    """Dots (column, row from the top) of a connected line through the mean of each column's points."""
    means: dict[int, list[float]] = {}
    for step, loss in line:
        means.setdefault(horizontal.cell(step, columns), []).append(loss)
    corners = [
        (column, rows - 1 - vertical.cell(sum(losses) / len(losses), rows)) for column, losses in sorted(means.items())
    ]
    dots = set(corners)
    for (left, start), (right, end) in pairwise(corners):
        for column in range(left, right):
            here, there = (start + (end - start) * (at - left) / (right - left) for at in (column, column + 1))
            dots.update((column, row) for row in range(round(min(here, there)), round(max(here, there)) + 1))
    return dots


def _cell(dots: set[tuple[int, int]], column: int, row: int, plain: bool) -> str:
    """The character of one cell."""
    if plain:
        return "*" if (column, row) in dots else " "
    bits = sum(
        _DOTS[down][right] for down in range(4) for right in range(2) if (2 * column + right, 4 * row + down) in dots
    )
    return chr(0x2800 + bits) if bits else " "


def _framed(cells: list[list[str]], horizontal: _Scale, vertical: _Scale, plain: bool) -> list[str]:
    """Axes: the highest, middle and lowest loss on the left, first and last step below."""
    height, width = len(cells), len(cells[0])
    side, tick, corner, floor = ("|", "+", "+", "-") if plain else ("│", "┤", "└", "─")
    decimals = 2 if vertical.high - vertical.low > 0.1 else 4
    middle = height // 2
    labels = {middle: vertical.value(1 - (middle + 0.5) / height), 0: vertical.high, height - 1: vertical.low}
    if vertical.high == vertical.low:
        labels = {height - 1 - vertical.cell(vertical.low, height): vertical.low}
    lines = []
    for row, characters in enumerate(cells):
        label, edge = (f"{labels[row]:.{decimals}f}", tick) if row in labels else ("", side)
        lines.append(f"{label:>8} {edge}{''.join(characters)}".rstrip())
    lines.append(f"{'':8} {corner}{floor * width}")
    first, last = str(round(horizontal.low)), str(round(horizontal.high))
    lines.append(f"{'':10}{first}{last:>{width - len(first)}}")
    return lines

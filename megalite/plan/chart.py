"""Draws a line chart: curves on common axes, with a legend."""

from collections.abc import Mapping, Sequence
from math import floor, log10

from megalite.plan.picture import Picture

WIDTH, HEIGHT, LEFT, TOP, LINE = 560.0, 300.0, 56.0, 34.0, 18.0  # pixels
COLOURS = 10  # of picture.css
TICKS = 6  # on an axis, at most


def chart(title: str, curves: Mapping[str, Sequence[tuple[float, float]]], x: str) -> Picture:
    """Curves by name, at least one point (x, y) each; `x` is the word below the axis."""
    picture, points = Picture(title), [point for curve in curves.values() for point in curve]
    (left, right), (low, high) = (_range(values) for values in zip(*points, strict=True))
    right_end, bottom = LEFT + WIDTH, TOP + HEIGHT

    def place(point: tuple[float, float]) -> tuple[float, float]:
        along, up = (point[0] - left) / (right - left), (point[1] - low) / (high - low)
        return LEFT + along * WIDTH, bottom - up * HEIGHT

    picture.text(0, 10, title, "title")
    for tick in _ticks(low, high):
        level = place((left, tick))[1]
        picture.path(f"M{LEFT} {level:.5g}H{right_end}", "grid")
        picture.text(LEFT - 6, level + 4, f"{tick:g}", "end")
    for tick in _ticks(left, right):
        picture.text(place((tick, low))[0], bottom + LINE, f"{tick:g}", "mid")
    picture.text(LEFT + WIDTH / 2, bottom + 2 * LINE, x, "mid")
    for number, (name, curve) in enumerate(curves.items()):
        colour, level = f"c{number % COLOURS} line", bottom + (number + 3) * LINE
        picture.path("M" + "L".join("{:.5g} {:.5g}".format(*place(point)) for point in curve), colour)
        picture.path(f"M{LEFT} {level - 4}h24", colour)
        picture.text(LEFT + 32, level, name)
    picture.width, picture.height = right_end + 8, bottom + (len(curves) + 3) * LINE
    return picture


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Least and greatest, apart from each other."""
    low, high = min(values), max(values)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`."""
    power = 10.0 ** floor(log10((high - low) / TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= TICKS)
    return [round(number * step, 12) for number in range(-floor(-low / step), floor(high / step) + 1)]

"""Draws a line chart: curves on common axes, with a legend."""

from collections.abc import Sequence
from math import floor, log10

from megalite.plan.picture import Picture

WIDTH, HEIGHT, LEFT, TOP, LINE = 560.0, 300.0, 56.0, 34.0, 18.0  # pixels
COLOURS = 10  # of picture.css
TICKS = 6  # on an axis, at most
LARGEST = 1e300  # of numbers that are drawn, so that the difference of two is finite
FLAT = 1e-12  # share of its numbers that a range must be wide, so that places in it are exact
Curve = tuple[str, Sequence[tuple[float, float]]]


def chart(title: str, curves: Sequence[Curve], x: str, dots: Curve | None = None) -> Picture:
    """Names and curves of points (x, y), of which those with NaN or an infinity are left out; `x` is the word below
    the axis. The points of `dots` are drawn one by one."""
    shown = [(name, [*filter(_can_be_drawn, curve)]) for name, curve in (*curves, *([dots] if dots else []))]
    picture, points = Picture(title), [point for _, curve in shown for point in curve] or [(0.0, 0.0)]
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
    for number, (name, curve) in enumerate(shown):
        colour, level = f"c{number % COLOURS} line", bottom + (number + 3) * LINE
        if dots and number == len(curves):
            picture.path("".join("M{:.5g} {:.5g}h-3v-3h6v6h-6v-3".format(*place(point)) for point in curve), colour)
        elif curve:
            picture.path("M" + "L".join("{:.5g} {:.5g}".format(*place(point)) for point in curve), colour)
        picture.path(f"M{LEFT} {level - 4}h24", colour)
        picture.text(LEFT + 32, level, name)
    picture.width, picture.height = right_end + 8, bottom + (len(shown) + 3) * LINE
    return picture


def _can_be_drawn(point: tuple[float, float]) -> bool:
    return all(abs(value) <= LARGEST for value in point)  # NaN is not


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Least and greatest, apart from each other."""
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    size = size if size > 1 / LARGEST else 1.0
    return (low, high) if high - low > FLAT * size else (low - size / 2, high + size / 2)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`."""
    power = 10.0 ** floor(log10((high - low) / TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= TICKS)
    return [number * step for number in range(-floor(-low / step), floor(high / step) + 1)]

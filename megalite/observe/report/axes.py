"""Chooses what the axes of a chart show: their ends, and round numbers along them as short texts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEW = 20  # with fewer values than this, an axis shows all of them
NOTHING = 1e-250  # values closer than this are drawn as equal: their distance is too small to divide by


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to 0 to 1."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def axis_of(values: Sequence[float], *, ticks: int = 5, from_zero: bool = False, counts: bool = False) -> Axis:
    """An axis that holds all (finite) values. With `counts`, values are steps or tokens and the axis ends with them."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if from_zero:
        low = min(low, 0.0)
    if high - low < NOTHING:
        room = abs(low) / 2 if abs(low) >= NOTHING else 1.0
        low, high = (low, high + room) if from_zero and low == 0 else (low - room, high + room)
    step = max(1.0, _step((high - low) / ticks, (1, 2, 5, 10))) if counts else _step((high - low) / ticks)
    if not counts:
        room = 0.04 * (high - low)
        low, high = low if from_zero and low == 0 else low - room, high + room
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, tuple(at * step for at in range(first, last + 1)))


def limits(values: Sequence[float]) -> tuple[float, float]:
    """The range that an axis should show: the middle nine tenths of the values, and values not far from them.

    A few first steps or a spike then leave the chart instead of flattening the rest.
    """
    ordered = sorted(values)
    last = len(ordered) - 1
    low, high = ordered[int(0.05 * last)], ordered[int(0.95 * last)]
    if len(ordered) < FEW or low == high:
        return ordered[0], ordered[-1]
    room = (high - low) / 2
    return max(ordered[0], low - room), min(ordered[-1], high + room)


def _step(least: float, factors: Sequence[float] = (1, 2, 2.5, 5, 10)) -> float:
    """The smallest of these factors times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in factors if factor * power >= least * (1 - 1e-9))


def percent(share: float) -> str:
    """A share of 1 on an axis."""
    return f"{100 * share:.4g}%"


def short(value: float) -> str:
    """A number on an axis in a few characters: 0.02, 1.5, 20k, 3M, 1e-5."""
    size = abs(value)
    if size and (size < 0.001 or size >= 1e15):
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.4g}{letter}"
    return f"{value:.4g}"

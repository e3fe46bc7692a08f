"""Round numbers for the axes of a chart."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Words = Callable[[float], str]

STEEP = 60.0  # values that differ by more than this factor are shown on a logarithmic axis, where one is allowed
NOTHING = 1e-250  # closer values are drawn as equal ones: nearer to the least float, distances cannot be divided


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to 0 to 1."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        if self.logarithmic:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def axis_of(
    values: Sequence[float], *, ticks: int = 5, from_zero: bool = False, steep: bool = False, counts: bool = False
) -> Axis:
    """An axis on which all (finite) values lie. `steep`: it may be logarithmic. `counts`: the values are steps or
    tokens, and it ends where they do."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if steep and low > NOTHING and high / low > STEEP:
        return _logarithmic(low, high)
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


def _logarithmic(low: float, high: float) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = -(-(last - first) // 6)
    return Axis(low * 0.8, high * 1.25, tuple(10.0**at for at in range(first, last + 1, every)), logarithmic=True)


def _step(least: float, factors: Sequence[float] = (1, 2, 2.5, 5, 10)) -> float:
    """The least of such factors of a power of ten that is no smaller."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in factors if factor * power >= least * (1 - 1e-9))


def labels(ticks: Sequence[float], words: Words) -> list[str]:
    """What stands at each tick: plain numbers with the same number of decimals."""
    texts = [words(tick) for tick in ticks]
    if words is not short or not all(text.lstrip("-").replace(".", "", 1).isdigit() for text in texts):
        return texts
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    return [f"{tick:.{decimals}f}" if tick else "0" for tick in ticks]


def scientific(value: float) -> str:
    """A small number on an axis: 3e-4, 2.5e-5."""
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}" if value else "0"


def percent(share: float) -> str:
    """A share of 1 on an axis."""
    return f"{100 * share:.4g}%"


def short(value: float) -> str:
    """A number on an axis, a few characters: 0.02, 1.5, 20k, 3M, 1e-5."""
    size = abs(value)
    if size and (size < 0.001 or size >= 1e15):
        return scientific(value)
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.4g}{letter}"
    return f"{value:.4g}"

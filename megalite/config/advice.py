"""Numbers that would work in place of one that does not, as text for a remedy."""

from collections.abc import Iterable

from megalite.parallel.layout_rules import divisors


def around(value: int, step: int) -> str:
    """The multiples of `step` next to `value`, as text: `96 or 120`."""
    below = value // step * step
    return " or ".join(str(number) for number in (below, below + step) if number > 0)


def divisors_near(number: int, value: int, count: int = 3) -> list[int]:
    """The divisors of `number` nearest to `value`, ascending."""
    return nearest_of(divisors(number), value, count)


def nearest_of(values: Iterable[int], value: int, count: int = 3) -> list[int]:
    """Those nearest to `value`, ascending."""
    return sorted(sorted(values, key=lambda one: abs(one - value))[:count])


def either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)

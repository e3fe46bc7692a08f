"""Values that would work in place of one that does not, and how they are written in a remedy."""

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from math import isqrt


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    found = {part for low in range(1, isqrt(number) + 1) if number % low == 0 for part in (low, number // low)}
    return sorted(found)


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


def similarity(one: str, other: str) -> float:
    """1 for equal words, 0 for words that share nothing."""
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def nearest(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The candidate spelled most like `word`, or None where none is near."""
    found = get_close_matches(word, list(candidates), n=1, cutoff=cutoff)
    return found[0] if found else None

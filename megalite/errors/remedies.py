"""Values that would work in place of one that does not, the nearest first, and the word that was most likely meant."""

from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher, get_close_matches
from math import isqrt

LARGEST_FACTORED = 1 << 32  # of larger numbers, only the small divisors are looked for
SMALL = 4096


def divisors(number: int, near: int) -> Iterator[int]:
    """The divisors of `number`, those nearest to `near` first."""
    most = isqrt(number) if number <= LARGEST_FACTORED else SMALL
    low = [part for part in range(1, most + 1) if number % part == 0]
    yield from nearest_first({*low, *(number // part for part in low)}, near)


def multiples(unit: int, near: int) -> Iterator[int]:
    """Multiples of `unit` above 0, those nearest to `near` first, without end."""
    below = near // unit * unit
    above = below + unit
    while True:
        if below > 0 and near - below <= above - near:
            yield below
            below -= unit
        else:
            yield above
            above += unit


def nearest_first(values: Iterable[int], near: int) -> Iterator[int]:
    yield from sorted(values, key=lambda value: (abs(value - near), value))


def similarity(one: str, other: str) -> float:
    """1 for equal words, 0 for words that share nothing."""
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def nearest(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The candidate spelled most like `word`, or None where none is near."""
    found = get_close_matches(word, list(candidates), n=1, cutoff=cutoff)
    return found[0] if found else None

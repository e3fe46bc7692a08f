"""Values that would work in place of one that does not, the nearest first; the word that was most likely meant; and
what mends a failure of the system."""

import errno
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher, get_close_matches
from math import isqrt

LARGEST_FACTORED = 1 << 32  # of larger numbers, only the small divisors are looked for
SMALL = 4096
OF_THE_MACHINE = {  # failures of the system that have nothing to do with a place on disk, and what mends them
    errno.EMFILE: "raise the limit of open files (ulimit -n 65536) and start again",
    errno.ENFILE: "too many files are open on this machine: end other programs and start again",
    errno.ENOMEM: "free some memory and start again",
}
CAUSES = OF_THE_MACHINE | {
    errno.ENOSPC: "free some space or, where df -i shows none, some files of that disk",
    errno.EDQUOT: "delete some files of this user's, whose quota there is used up, or have it raised",
    errno.EIO: "the disk, or the network to it, fails (see dmesg): start again once it works",
    errno.ESTALE: "the network's disk was mounted anew: start again",
    errno.EROFS: "mount that disk for writing",
    errno.EACCES: "allow this user to read and write there (ls -l shows who may)",
    errno.EPERM: "allow this user to read and write there (ls -l and lsattr show who may)",
}


def of_system(error: OSError, otherwise: str) -> str:
    """What mends a failure of the system, by its cause; `otherwise` where the cause says nothing."""
    return CAUSES.get(error.errno or 0, otherwise)


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

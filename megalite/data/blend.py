"""Says which part of a blend sample i comes from, and its number within that part: a pure function of i.

After x samples, part p has given its share of x by Webster's method: part p's sample number c is due at time
(c + 1/2) / weight, and samples are taken in order of their times. Webster's counts never shrink as x grows, so the
counts at two neighbouring block borders say exactly which samples lie between them; nothing grows with the run.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import lcm

import numpy as np

from megalite.data.permutation import IntArray

BLOCK = 1024  # samples that are laid out together


def integer_weights(weights: list[float]) -> tuple[int, ...]:
    """The same proportions as whole numbers, so that counting is exact at any length of the run."""
    shares = [Fraction(str(weight)) for weight in weights]
    common = lcm(*(share.denominator for share in shares))
    return tuple(int(share * common) for share in shares)


@dataclass(frozen=True)
class Blend:
    """Parts mixed in the proportions of `weights` (whole numbers, all above 0)."""

    weights: tuple[int, ...]

    @cached_property
    def total(self) -> int:
        return sum(self.weights)

    def counts(self, samples: int) -> tuple[int, ...]:
        """How many of the first `samples` come from each part. They sum to `samples`, exactly."""
        counts = [(2 * samples * weight + self.total) // (2 * self.total) for weight in self.weights]  # rounded shares
        parts = range(len(counts))
        while sum(counts) < samples:  # the part whose next sample is due first gives it
            counts[min(parts, key=lambda part: (self._due(part, counts[part]), part))] += 1
        while sum(counts) > samples:  # the part whose last sample is due last takes it back
            counts[max(parts, key=lambda part: (self._due(part, counts[part] - 1), part))] -= 1
        return tuple(counts)

    def locate(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        """For each sample of `indices` [n]: its part [n] and its number within that part [n]."""
        if len(self.weights) == 1:
            return np.zeros_like(indices), indices
        parts, numbers = np.empty_like(indices), np.empty_like(indices)
        blocks = indices // BLOCK
        for block in np.unique(blocks):
            chosen = blocks == block
            block_parts, block_numbers = _block(self, int(block))
            parts[chosen] = block_parts[indices[chosen] % BLOCK]
            numbers[chosen] = block_numbers[indices[chosen] % BLOCK]
        return parts, numbers

    def index(self, part: int, number: int) -> int:
        """Which sample of the run is sample `number` of `part`: so many of all parts are due before it."""
        own = self.weights[part]
        # Sample c of another part is before it if (2 c + 1) / weight < (2 number + 1) / own, or equal and the part is.
        last = [((2 * number + 1) * weight - (other >= part)) // own for other, weight in enumerate(self.weights)]
        return sum((odd + 1) // 2 for odd in last)  # so many odd numbers 2 c + 1 are not above it

    def _due(self, part: int, number: int) -> Fraction:
        return Fraction(2 * number + 1, self.weights[part])


@lru_cache(maxsize=8)
def _block(blend: Blend, block: int) -> tuple[IntArray, IntArray]:
    """Parts [BLOCK] and numbers within the part [BLOCK] of samples block * BLOCK onwards."""
    before, after = blend.counts(block * BLOCK), blend.counts((block + 1) * BLOCK)
    parts = np.repeat(np.arange(len(before)), np.subtract(after, before))
    numbers = np.concatenate([np.arange(first, stop) for first, stop in zip(before, after, strict=True)])
    due = (numbers + 0.5) / np.array(blend.weights, dtype=np.float64)[parts]
    order = np.lexsort((parts, due))
    return parts[order].astype(np.int64), numbers[order].astype(np.int64)

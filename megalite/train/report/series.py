"""Values over the steps of a run of any length, in bounded memory, of which no peak is lost.

Neighbouring steps share a bucket that keeps their mean, least and greatest value. Buckets are of one width, a power of
two of steps, which doubles when there are too many.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

MOST = 360  # buckets


@dataclass(frozen=True)
class Bucket:
    """The values of steps `first` to `last`."""

    first: int
    last: int
    low: float
    high: float
    total: float
    count: int

    @property
    def at(self) -> float:
        """The step that stands for all."""
        return (self.first + self.last) / 2

    @property
    def mean(self) -> float:
        return self.total / self.count

    def joined(self, other: "Bucket") -> "Bucket":
        return Bucket(
            self.first,
            other.last,
            min(self.low, other.low),
            max(self.high, other.high),
            self.total + other.total,
            self.count + other.count,
        )


class Series:
    """One figure, by step. Steps come in ascending order; values that are not finite leave no trace."""

    def __init__(self) -> None:
        self._width = 1
        self._buckets: list[Bucket] = []

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    def __getitem__(self, at: int) -> Bucket:
        return self._buckets[at]

    def add(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            return
        self._append(Bucket(step, step, value, value, value, 1))
        while len(self._buckets) > MOST:
            finer, self._buckets, self._width = self._buckets, [], 2 * self._width
            for bucket in finer:
                self._append(bucket)

    def _append(self, bucket: Bucket) -> None:
        if self._buckets and self._buckets[-1].first // self._width == bucket.first // self._width:
            self._buckets[-1] = self._buckets[-1].joined(bucket)
        else:
            self._buckets.append(bucket)

"""One figure of a run, by step or by tokens, in bounded memory, however long the run is.

Neighbouring steps share a bucket that keeps their mean, least and greatest value, so no peak is lost. All buckets have
the same width, a power of two of steps. The width doubles when there are too many buckets.
"""

import math
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
    def x(self) -> float:
        """The step at which the bucket is drawn."""
        return (self.first + self.last) / 2

    @property
    def y(self) -> float:
        """The mean."""
        return self.total / self.count

    def joined(self, other: "Bucket") -> "Bucket":
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Bucket(self.first, other.last, low, high, self.total + other.total, self.count + other.count)


class Series:
    """One figure. Steps come in ascending order; values that are not finite are left out."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self._width = 1

    def __bool__(self) -> bool:
        return bool(self.buckets)

    @property
    def mean(self) -> float:
        """The mean of all values, 0 of none."""
        return sum(bucket.total for bucket in self.buckets) / max(1, sum(bucket.count for bucket in self.buckets))

    def add(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            return
        self._append(Bucket(step, step, value, value, value, 1))
        while len(self.buckets) > MOST:
            finer, self.buckets, self._width = self.buckets, [], 2 * self._width
            for bucket in finer:
                self._append(bucket)

    def _append(self, bucket: Bucket) -> None:
        if self.buckets and self.buckets[-1].first // self._width == bucket.first // self._width:
            self.buckets[-1] = self.buckets[-1].joined(bucket)
        else:
            self.buckets.append(bucket)

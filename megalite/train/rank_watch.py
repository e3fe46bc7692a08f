"""What each rank takes of memory and time, and who is slower than its equals.

A rank's own time is what it computes, without waiting for others (forward, backward, optimizer). Ranks that hold the
same stage of the pipeline compute alike, so one that takes much longer than half of them has a reason of its own: a hot
or throttled device, a busy host. Inside a tensor-parallel group ranks wait for each other in every layer, so there a
slow one slows all of its group, which stands out among other groups.
"""

import socket
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.parallel.context import ParallelContext
from megalite.train.records import Part

OWN: tuple[Part, ...] = ("forward", "backward", "optimizer")  # what a rank does without waiting for others
SLOW = 1.3  # times as long as the median of its equals
FEWEST, MOST = 5, 50  # steps to judge by: the newest


@dataclass(frozen=True)
class Straggler:
    """A rank that takes `times` as long as others with the same work."""

    rank: int
    times: float


@dataclass(frozen=True)
class RankFigures:
    """By rank, at one moment."""

    memory_gib: list[float]
    compute_s: list[float]  # of a step: the median of the newest MOST
    stragglers: list[Straggler]


class RankWatch:
    """Collects this rank's times; now and then all ranks tell each other."""

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._own: deque[float] = deque(maxlen=MOST)
        self._stages = [context.layout.dense.coordinates(rank)["pp"] for rank in range(context.world_size)]

    def hosts(self) -> list[str]:
        """Where each rank runs; all ranks call it."""
        return [host for (host,) in self._context.gather_json([socket.gethostname()])]

    def add(self, split: Mapping[Part, float]) -> None:
        """A step's times on this rank."""
        self._own.append(sum(split[part] for part in OWN))

    def gather(self, memory_gib: float) -> RankFigures:
        """Figures of all ranks; all ranks call it after the same step. One small all-gather."""
        own = statistics.median(self._own) if self._own else 0.0
        told = self._context.gather_json([round(memory_gib, 3), round(own, 6)])
        memory, compute = ([figures[at] for figures in told] for at in (0, 1))
        return RankFigures(memory, compute, stragglers(compute, self._stages) if len(self._own) >= FEWEST else [])


def stragglers(compute_s: Sequence[float], stages: Sequence[int]) -> list[Straggler]:
    """Who takes more than SLOW times the (lower) median of the ranks of its stage, slowest first.

    `stages`: the pipeline rank of each rank. A stage that one rank holds has nobody to compare with.
    """
    found = []
    for stage in sorted(set(stages)):
        equals = [rank for rank, its in enumerate(stages) if its == stage]
        usual = statistics.median_low(compute_s[rank] for rank in equals)
        if usual > 0:
            found += [Straggler(rank, compute_s[rank] / usual) for rank in equals if compute_s[rank] > SLOW * usual]
    return sorted(found, key=lambda straggler: -straggler.times)

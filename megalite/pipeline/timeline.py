"""When each rank did what: the record that the simulator and a run's recording give and the painter draws.

No torch import.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megalite.pipeline.actions import Action, InFlight, Kind, Schedule, in_flight

Durations = Mapping[tuple[int, int, Kind], float]  # (rank, chunk, kind) -> time of such an action


class Unit(NamedTuple):
    """What times are shown in: each time the scale, then the words."""

    words: str
    scale: float


FORWARD_PASSES = Unit("forward passes of a rank", 1)  # as equal_durations has it
MILLISECONDS = Unit("ms", 1000)  # of recorded seconds


class Span(NamedTuple):
    """One action, from its start to its end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each pipeline rank in order, all on one clock of any unit."""

    name: str
    vpp: int
    microbatches: int
    ranks: tuple[tuple[Span, ...], ...]

    @property
    def pp(self) -> int:
        return len(self.ranks)

    @cached_property
    def begin(self) -> float:
        return min((spans[0].start for spans in self.ranks if spans), default=0.0)

    @cached_property
    def end(self) -> float:
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return self.end - self.begin

    @cached_property
    def computing(self) -> float:
        """Time that all ranks together compute."""
        return sum(span.end - span.start for spans in self.ranks for span in spans)

    @property
    def bubble(self) -> float:
        """Idle time per computing time, as the papers count it: (pp-1)/microbatches for 1f1b and equal stages."""
        return self.pp * self.makespan / self.computing - 1 if self.computing else 0.0

    @property
    def idle(self) -> float:
        """Idle share of the whole: bubble / (1 + bubble)."""
        return self.bubble / (1 + self.bubble)

    @cached_property
    def in_flight(self) -> tuple[InFlight, ...]:
        """The most that each rank holds at once."""
        return tuple(in_flight([span.action for span in spans]) for spans in self.ranks)

    @property
    def title(self) -> str:
        """`1f1b: pp 4, 8 microbatches`"""
        chunks = f", vpp {self.vpp}" if self.vpp > 1 else ""
        batch = "1 microbatch" if self.microbatches == 1 else f"{self.microbatches} microbatches"
        return f"{self.name}: pp {self.pp}{chunks}, {batch}"

    def summary(self, unit: Unit) -> str:
        """How long the step is and how much of it is lost."""
        return (
            f"step {self.makespan * unit.scale:.4g} {unit.words}; idle {self.idle:.1%} of it "
            f"(bubble: {self.bubble:.4g} of the time that is spent computing)"
        )

    def held(self, rank: int) -> str:
        """What a rank holds at most, in activations of all its layers: a chunk counts for its share."""
        share = self.in_flight[rank].together / self.vpp
        return f"{share:.4g} {'microbatch' if share == 1 else 'microbatches'}"

    def durations(self) -> Durations:
        """The mean time of each kind of action on each chunk of each rank: what the simulator predicts a run from."""
        times = defaultdict[tuple[int, int, Kind], list[float]](list)
        for rank, spans in enumerate(self.ranks):
            for action, start, end in spans:
                times[rank, action.chunk, action.kind].append(end - start)
        return {key: sum(values) / len(values) for key, values in times.items()}


def equal_durations(
    schedule: Schedule, forward: float = 1, backward_input: float = 1, backward_weight: float = 1
) -> Durations:
    """Every chunk takes these times; a whole backward pass takes as long as its two halves."""
    times: dict[Kind, float] = {
        "forward": forward,
        "backward": backward_input + backward_weight,
        "backward-input": backward_input,
        "backward-weight": backward_weight,
    }
    chunks = ((rank, chunk) for rank in range(schedule.pp) for chunk in range(schedule.vpp))
    return {(rank, chunk, kind): time for rank, chunk in chunks for kind, time in times.items()}

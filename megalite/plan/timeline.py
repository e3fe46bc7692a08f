"""Describes when each rank did what, simulated or recorded: the bubble, what each rank holds, and a summary in words.

No torch import.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megalite.errors.words import several
from megalite.pipeline.actions import Action, ActionKind, Schedule
from megalite.pipeline.simulator import Durations, Span, equal_durations, simulate


class Unit(NamedTuple):
    """What times are shown in: each time the scale, then the words."""

    words: str
    scale: float


FORWARD_PASSES = Unit("forward passes of a rank", 1)  # as equal_durations has it
MILLISECONDS = Unit("ms", 1000)  # of recorded seconds


class InFlight(NamedTuple):
    """The most that a rank holds at once, in activations of one chunk for one microbatch.

    `activations`: forward done, backward or backward-input not yet. `weights`: what backward-input leaves for
    backward-weight. `together`: the most of both at one time.
    """

    activations: int
    weights: int
    together: int


CHANGES: dict[ActionKind, tuple[int, int]] = {  # of activations and weights that are held
    "forward": (1, 0),
    "backward": (-1, 0),
    "backward-input": (-1, 1),
    "backward-weight": (0, -1),
}


def in_flight(actions: Iterable[Action]) -> InFlight:
    """What a rank that performs these actions holds."""
    activations = weights = 0
    peaks = InFlight(0, 0, 0)
    for action in actions:
        more, left = CHANGES[action.kind]
        activations, weights = activations + more, weights + left
        peaks = InFlight(*map(max, peaks, (activations, weights, activations + weights)))
    return peaks


@dataclass(frozen=True)
class Timeline:
    """The spans of each pipeline rank in order, all on one clock of any unit that begins at 0."""

    name: str
    vpp: int
    microbatches: int
    ranks: tuple[tuple[Span, ...], ...]

    @property
    def pp(self) -> int:
        return len(self.ranks)

    @cached_property
    def makespan(self) -> float:
        """The last end."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

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

    @property
    def title(self) -> str:
        """`1f1b: pp 4, 8 microbatches`"""
        chunks = f", vpp {self.vpp}" if self.vpp > 1 else ""
        batch = several(self.microbatches, "microbatch")
        return f"{self.name}: pp {self.pp}{chunks}, {batch}"

    def summary(self, unit: Unit) -> str:
        """How long the step is and how much of it is lost."""
        bubble = f"bubble: {self.bubble:.4g} of the time that is spent computing"
        return f"step {self.makespan * unit.scale:.4g} {unit.words}; idle {self.idle:.1%} of it ({bubble})"

    def held(self, rank: int) -> str:
        """What a rank holds at most, in activations of all its layers: a chunk counts for its share."""
        share = in_flight(span.action for span in self.ranks[rank]).together / self.vpp
        return f"{share:.4g} {'microbatch' if share == 1 else 'microbatches'}"

    def durations(self) -> Durations:
        """The mean time of each kind of action on each chunk of each rank: what the simulator predicts a run from."""
        times = defaultdict[tuple[int, int, ActionKind], list[float]](list)
        for rank, spans in enumerate(self.ranks):
            for action, start, end in spans:
                times[rank, action.chunk, action.kind].append(end - start)
        return {key: sum(values) / len(values) for key, values in times.items()}


def simulated(schedule: Schedule, durations: Durations | None = None, transfer: float = 0) -> Timeline:
    """The timeline that the simulator computes; by default every chunk takes `equal_durations`."""
    spans = simulate(schedule, durations or equal_durations(schedule), transfer)
    return Timeline(schedule.name, schedule.vpp, schedule.microbatches, spans)

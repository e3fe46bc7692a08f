"""Describes when each pipeline rank did what, simulated or recorded: the bubble, and what each rank holds.

A run records steps in pipeline.jsonl, a line for each step and rank of the run's first pipeline:

    {"step": 20, "schedule": "1f1b", "pp": 4, "rank": 0, "actions": [["0F0", 0.0, 0.0131], ["0F1", 0.0131, 0.0262]]}

Times are seconds on one clock for all ranks of a step. Lines of a step come from rank 0 on; a killed run may have left
some torn or missing, and the step is passed over. The last complete lines of a step count. No torch import.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from megalite.errors.problems import Problem, UserError
from megalite.errors.words import several
from megalite.pipeline.actions import Action, ActionKind, Schedule, parse_action
from megalite.pipeline.simulator import Durations, Span, equal_durations, simulate
from megalite.train.history import PIPELINE


class Unit(NamedTuple):
    """The unit of shown times: a time is multiplied by `scale`."""

    words: str
    scale: float


TAIL = 2**24  # bytes at the end of pipeline.jsonl that hold the last step
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
    """The most that a rank with these actions holds."""
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
        return f"{self.name}: pp {self.pp}{chunks}, {several(self.microbatches, 'microbatch')}"

    def summary(self, unit: Unit) -> str:
        """How long the step is and how much of it is lost."""
        bubble = f"bubble: {self.bubble:.4g} of the time that is spent computing"
        return f"step {self.makespan * unit.scale:.4g} {unit.words}; idle {self.idle:.1%} of it ({bubble})"

    def held(self, rank: int) -> str:
        """The most that a rank holds, in activations of all its layers: a chunk counts for its share."""
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


def read_recording(run_dir: Path, step: int | None = None, setting: str = "run_dir") -> tuple[int, Timeline]:
    """A recorded step (default: the last one) and its timeline, which begins at 0; UserError where there is none."""
    try:
        with (run_dir / PIPELINE).open("rb") as file:
            if step is None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            recorded = _complete_steps(file.read().decode(errors="replace").splitlines())
        rule = f"{PIPELINE} holds no step of which all ranks are recorded"
    except OSError as error:
        recorded, rule = {}, f"{PIPELINE} cannot be read there: {error.strerror}"
    if not recorded:
        raise UserError(Problem(setting, str(run_dir), rule, "the folder of a run that recorded its pipeline"))
    chosen = max(recorded) if step is None else step
    if chosen not in recorded:
        remedy = f"step {min(recorded, key=lambda one: abs(one - chosen))}, or none for the last"
        raise UserError(Problem(setting, str(run_dir), f"step {chosen} is not recorded", remedy))
    name, ranks = recorded[chosen]
    zero = min((spans[0].start for spans in ranks if spans), default=0.0)
    actions = [span.action for spans in ranks for span in spans]
    return chosen, Timeline(
        name,
        vpp=1 + max((action.chunk for action in actions), default=0),
        microbatches=1 + max((action.microbatch for action in actions), default=-1),
        ranks=tuple(tuple(Span(action, start - zero, end - zero) for action, start, end in spans) for spans in ranks),
    )


def _complete_steps(lines: list[str]) -> dict[int, tuple[str, list[list[Span]]]]:
    """The schedule's name and the spans of all ranks, by step."""
    complete: dict[int, tuple[str, list[list[Span]]]] = {}
    ranks: list[list[Span]] = []  # of the step that is being read
    reading: tuple[int, int, str] | None = None
    for line in lines:
        try:
            record = json.loads(line)
            step, pp, rank, schedule = int(record["step"]), int(record["pp"]), record["rank"], str(record["schedule"])
            spans = [Span(parse_action(cell), float(begin), float(end)) for cell, begin, end in record["actions"]]
        except (ValueError, TypeError, KeyError, OverflowError, UserError):
            ranks = []
            continue
        if rank == 0 or (step, pp, schedule) != reading:
            ranks, reading = [], (step, pp, schedule)
        if rank == len(ranks):
            ranks.append(spans)
            if len(ranks) == pp:
                complete[step] = schedule, ranks
    return complete

"""A pipeline schedule as data: for each pipeline rank, the actions that it computes, in their order.

An action works on one microbatch with one chunk of the rank's layers; chunk c on rank r is stage c*pp + r, as in
`megalite.parallel.stages`. In text an action is a cell: the chunk, a letter, the microbatch. `0F3` is the forward pass
of microbatch 3 through chunk 0; the rank is the line that the cell stands on. No torch import.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from megalite.config.problems import Problem, UserError

Kind = Literal["forward", "backward", "backward-input", "backward-weight"]
LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "backward-input": "I", "backward-weight": "W"}
_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)


class Action(NamedTuple):
    """One step of a rank. `backward` is `backward-input` (gradients of activations) and `backward-weight` in one."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{LETTERS[self.kind]}{self.microbatch}"


def parse_action(cell: str) -> Action:
    """`0F3` -> Action("forward", 0, 3). Raises UserError where the text is no action."""
    found = _CELL.fullmatch(cell)
    if found is None:
        rule = "not an action"
        raise UserError(Problem("action", cell, rule, "chunk, one of F B I W, microbatch: 0F3"))
    chunk, letter, microbatch = found.groups()
    return Action(_KINDS[letter], int(chunk), int(microbatch))


@dataclass(frozen=True)
class Schedule:
    """A table of actions. Nothing says that it can be performed: that is for the checker.

    `ranks`: the actions of each pipeline rank, in order. `most_in_flight`: for each rank, how many activations of one
    chunk for one microbatch it may hold between their forward and their backward(-input) pass; None: as many as come.
    `most_together`: how many with those that wait for their backward-weight; None: likewise.
    """

    name: str
    vpp: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    forward_only: bool = False
    most_in_flight: tuple[int, ...] | None = None
    most_together: tuple[int, ...] | None = None

    @cached_property
    def pp(self) -> int:
        return len(self.ranks)

    @cached_property
    def stages(self) -> int:
        """Stages of the whole pipeline: vpp chunks on each of pp ranks."""
        return self.pp * self.vpp

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that is this chunk of this rank."""
        return chunk * self.pp + rank

    def made(self, rank: int, action: Action) -> int | None:
        """The number, of its own in the whole step, of the tensor that another stage needs from the action."""
        kind, chunk, microbatch = action
        stage = chunk * self.pp + rank
        if kind == "forward":
            return stage * self.microbatches + microbatch if stage < self.stages - 1 else None
        gradient = kind != "backward-weight" and stage > 0
        return (self.stages + stage) * self.microbatches + microbatch if gradient else None

    def needed(self, rank: int, action: Action) -> int | None:
        """The number of the tensor that the action needs from another stage."""
        kind, chunk, microbatch = action
        stage = chunk * self.pp + rank
        if kind == "forward":
            return (stage - 1) * self.microbatches + microbatch if stage > 0 else None
        gradient = kind != "backward-weight" and stage < self.stages - 1
        return (self.stages + stage + 1) * self.microbatches + microbatch if gradient else None


@dataclass(frozen=True)
class Flaw:
    """Why a table cannot be performed: on `rank`, at `position` of its actions (None: nowhere in particular)."""

    rank: int
    position: int | None
    action: Action | None
    reason: str

    def __str__(self) -> str:
        place = "" if self.position is None else f", action {self.position}"
        return f"rank {self.rank}{place}{'' if self.action is None else f' ({self.action})'}: {self.reason}"


def render(schedule: Schedule) -> str:
    """One line for each rank, one cell for each action, in columns."""
    cells = [[str(action) for action in actions] for actions in schedule.ranks]
    width = max((len(cell) for line in cells for cell in line), default=0)
    return "\n".join(" ".join(cell.ljust(width) for cell in line).rstrip() for line in cells)


def parse(text: str, name: str = "custom") -> Schedule:
    """The schedule of such lines; blank lines count for nothing. Raises UserError with all cells that are no actions.

    How many chunks and microbatches there are is told by the largest of them.
    """
    problems: list[Problem] = []
    ranks = tuple(_line(line, problems) for line in text.splitlines() if line.strip())
    if problems:
        raise UserError(problems)
    actions = [action for line in ranks for action in line]
    return Schedule(
        name,
        vpp=1 + max((action.chunk for action in actions), default=0),
        microbatches=1 + max((action.microbatch for action in actions), default=-1),
        ranks=ranks,
        forward_only=all(action.kind == "forward" for action in actions),
    )


class InFlight(NamedTuple):
    """The most that a rank holds at once, in activations of one chunk for one microbatch.

    `activations`: forward done, backward or backward-input not yet. `weights`: what backward-input leaves for
    backward-weight. `together`: the most of both at one time.
    """

    activations: int
    weights: int
    together: int


def in_flight(actions: Sequence[Action]) -> InFlight:
    """What a rank that performs these actions holds."""
    activations = weights = 0
    peaks = (0, 0, 0)
    for action in actions:
        if action.kind == "forward":
            activations += 1
        elif action.kind == "backward-weight":
            weights -= 1
        else:
            activations -= 1
            weights += action.kind == "backward-input"
        peaks = max(peaks[0], activations), max(peaks[1], weights), max(peaks[2], activations + weights)
    return InFlight(*peaks)


def _line(line: str, problems: list[Problem]) -> tuple[Action, ...]:
    actions = []
    for cell in line.split():
        try:
            actions.append(parse_action(cell))
        except UserError as error:
            problems += error.problems
    return tuple(actions)

"""Defines a pipeline schedule as data: for each pipeline rank, the actions that it computes, in their order.

An action works on one microbatch with one chunk of the rank's layers. Chunk c of rank r is stage c*pp + r. In text an
action is a cell: the chunk, a letter, the microbatch. `0F3` is the forward pass of microbatch 3 through chunk 0. No
torch import.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from megalite.errors.problems import Problem, UserError

ActionKind = Literal["forward", "backward", "backward-input", "backward-weight"]
LETTERS: dict[ActionKind, str] = {"forward": "F", "backward": "B", "backward-input": "I", "backward-weight": "W"}
_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)


class Action(NamedTuple):
    """One step of a rank. `backward` is `backward-input` (gradients of activations) and `backward-weight` in one."""

    kind: ActionKind
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
    """The actions of all ranks. The checker tells whether they can be performed.

    `ranks`: the actions of each pipeline rank, in order. `most_in_flight`: for each rank, how many activations of one
    chunk for one microbatch it may hold between their forward and their backward(-input) pass. `most_together`: how
    many it may hold with those that wait for their backward-weight. None: no limit.
    """

    name: str
    vpp: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    most_in_flight: tuple[int, ...] | None = None
    most_together: tuple[int, ...] | None = None
    forward_only: bool = False

    @cached_property
    def pp(self) -> int:
        return len(self.ranks)

    @cached_property
    def stages(self) -> int:
        """Stages of the whole pipeline: vpp chunks on each of pp ranks."""
        return self.pp * self.vpp

    def sent_tensor_id(self, rank: int, action: Action) -> int | None:
        """The tensor that the action sends to another stage; its id is unique in the step.

        Ids count the microbatches of each stage's activations, then the microbatches of each stage's gradients.
        """
        kind, chunk, microbatch = action
        stage = chunk * self.pp + rank
        if kind == "forward":
            return stage * self.microbatches + microbatch if stage < self.stages - 1 else None
        gradient = kind != "backward-weight" and stage > 0
        return (self.stages + stage) * self.microbatches + microbatch if gradient else None

    def received_tensor_id(self, rank: int, action: Action) -> int | None:
        """The tensor that the action receives: what its neighbour stage sends under this id."""
        kind, chunk, microbatch = action
        stage = chunk * self.pp + rank
        if kind == "forward":
            return (stage - 1) * self.microbatches + microbatch if stage > 0 else None
        gradient = kind != "backward-weight" and stage < self.stages - 1
        return (self.stages + stage + 1) * self.microbatches + microbatch if gradient else None


@dataclass(frozen=True)
class Flaw:
    """Why a schedule cannot be performed: on `rank`, at `position` of its actions (None: nowhere in particular)."""

    rank: int
    position: int | None
    action: Action | None
    reason: str

    def __str__(self) -> str:
        place = "" if self.position is None else f", action {self.position}"
        return f"rank {self.rank}{place}{'' if self.action is None else f' ({self.action})'}: {self.reason}"

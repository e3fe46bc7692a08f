"""Defines a pipeline schedule as data: for each pipeline rank, the actions that it computes, in their order.

An action works on one microbatch with one chunk of the rank's layers. Chunk c of rank r is stage c*pp + r. In text an
action is a cell: the chunk, a letter, the microbatch. `0F3` is the forward pass of microbatch 3 through chunk 0. No
torch import.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

Direction = Literal["forward", "backward"]  # of what travels: activations, gradients
Role = Literal["send", "receive"]
Place = tuple[Direction, int, int]  # what a rank's chunk receives or sends of a microbatch: (way, chunk, microbatch)
ActionKind = Literal["forward", "backward", "backward-input", "backward-weight"]
HELD: dict[ActionKind, int] = {"forward": 1, "backward": -1, "backward-input": 0, "backward-weight": -1}
LETTERS: dict[ActionKind, str] = {"forward": "F", "backward": "B", "backward-input": "I", "backward-weight": "W"}
_KINDS = {letter: kind for kind, letter in LETTERS.items()}


class Action(NamedTuple):
    """One step of a rank. `backward` is `backward-input` (gradients of activations) and `backward-weight` in one."""

    kind: ActionKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{LETTERS[self.kind]}{self.microbatch}"

    @property
    def place(self) -> Place:
        return "forward" if self.kind == "forward" else "backward", self.chunk, self.microbatch


def parse_action(cell: str) -> Action:
    """`0F3` -> Action("forward", 0, 3). Raises ValueError where the text is no action."""
    found = re.fullmatch(r"(\d+)([FBIW])(\d+)", cell)
    if found is None:
        raise ValueError(f"{cell!r} is not an action: chunk, one of F B I W, microbatch: 0F3")
    chunk, letter, microbatch = found.groups()
    return Action(_KINDS[letter], int(chunk), int(microbatch))


def in_flight(actions: Iterable[Action]) -> int:
    """The most that a rank with these actions holds at once, in activations of one chunk for one microbatch. What
    backward-input leaves for backward-weight counts as an activation."""
    return max(accumulate((HELD[action.kind] for action in actions), initial=0))


@dataclass(frozen=True)
class Schedule:
    """The actions of each pipeline rank, in order. The checker tells whether they can be performed."""

    name: str
    vpp: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def pp(self) -> int:
        return len(self.ranks)

    def tensor_id(self, role: Role, rank: int, action: Action) -> int | None:
        """The tensor that the action sends to another stage, or receives from one; None where it does not.

        Ids count the microbatches of each stage's activations, then the microbatches of each stage's gradients.
        """
        stages, stage, forward = self.pp * self.vpp, action.chunk * self.pp + rank, action.kind == "forward"
        sender = stage if role == "send" else stage - 1 if forward else stage + 1
        senders = range(stages - 1) if forward else range(1, stages)
        if action.kind == "backward-weight" or sender not in senders:
            return None
        return (sender if forward else stages + sender) * self.microbatches + action.microbatch

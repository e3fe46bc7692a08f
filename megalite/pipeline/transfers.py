"""Derives a rank's instructions from a schedule: what it computes, which transfers it posts when, what it waits for.

Activations go from a rank to the next one (from the last to the first, which holds the next chunk), gradients to the
previous one, and each direction has a communicator of its own. A communicator takes what a rank posts to it one after
the other, and a send ends no sooner than its receive has begun. So both ranks must post the transfers between them in
one order: that of the time T at which the sender has computed them in a step of equal stage times with short transfers
(of equal T: of the sender's stage). Nothing then waits in a circle: of all transfers that are still to come, the one of
smallest T stands first on both of its ranks, and whatever its sender has yet to wait for has a smaller T.

A send is posted when its action is done, a receive before the action during which its T passes: early enough for the
sender, and not so early that it holds memory (on a GPU also a few multiprocessors) for nothing. A send is waited for
before the next one in its direction: at most one output is kept besides the newest. No torch import.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from megalite.pipeline.actions import Action, Direction, Place, Role, Schedule
from megalite.pipeline.simulator import Span, equal_durations, simulate

STEP, FLIGHT = 4, 1  # of the order's equal stage times: a forward pass or half a backward pass, and a transfer


class Transfer(NamedTuple):
    """One tensor between this rank and the pipeline rank `peer`.

    `chunk` is this rank's chunk: the one whose output it sends (an activation, or the gradient of its input), or whose
    input it receives (an activation, or the gradient of its output).
    """

    role: Role
    direction: Direction  # which communicator
    peer: int
    chunk: int
    microbatch: int
    tensor_id: int  # the same on both ranks

    @property
    def place(self) -> Place:
        return self.direction, self.chunk, self.microbatch

    def __str__(self) -> str:
        """`receive the activation for 0F3 from rank 1`"""
        what, letter = ("activation", "F") if self.direction == "forward" else ("gradient", "B")
        belongs, way = ("of", "to") if self.role == "send" else ("for", "from")
        return f"{self.role} the {what} {belongs} {self.chunk}{letter}{self.microbatch} {way} rank {self.peer}"


class Wait(NamedTuple):
    """Go on when the transfer, posted before, is done."""

    transfer: Transfer


Instruction = Action | Transfer | Wait  # compute the action; post the transfer and go on; wait


def instructions(schedule: Schedule) -> tuple[tuple[Instruction, ...], ...]:
    """The work of each pipeline rank in a step. The schedule must be sound (checker.py)."""
    ideal = simulate(schedule, equal_durations(schedule, STEP), FLIGHT)
    assert list(map(len, ideal)) == list(map(len, schedule.ranks)), "actions wait for each other"
    order: dict[int, tuple[float, int]] = {}  # by tensor: what transfers of one direction are ordered by
    for rank, spans in enumerate(ideal):
        for action, _, end in spans:
            if (sent := schedule.tensor_id("send", rank, action)) is not None:
                order[sent] = end, action.chunk * schedule.pp + rank
    return tuple(tuple(_of_rank(schedule, rank, spans, order)) for rank, spans in enumerate(ideal))


def transfer_of(role: Role, schedule: Schedule, rank: int, action: Action) -> Transfer | None:
    """The transfer that brings an action its input ("receive"), or takes its output to another rank ("send")."""
    tensor_id, (direction, chunk, microbatch) = schedule.tensor_id(role, rank, action), action.place
    if tensor_id is None:
        return None
    to_the_next = (role == "send") == (direction == "forward")
    peer = (rank + (1 if to_the_next else -1)) % schedule.pp
    return Transfer(role, direction, peer, chunk, microbatch, tensor_id)


def _of_rank(
    schedule: Schedule, rank: int, spans: tuple[Span, ...], order: dict[int, tuple[float, int]]
) -> Iterator[Instruction]:
    receives = [transfer_of("receive", schedule, rank, span.action) for span in spans]
    sends = [transfer_of("send", schedule, rank, span.action) for span in spans]
    starts = [span.start for span in spans]
    before: list[list[Instruction]] = [[] for _ in spans]  # the receives that are posted before or after each action
    after: list[list[Instruction]] = [[] for _ in spans]
    for early in sorted((one for one in receives if one is not None), key=lambda one: order[one.tensor_id]):
        turn = order[early.tensor_id]
        position = max(bisect_left(starts, turn[0]) - 1, 0)  # the last action that begins before the sender is done
        send = sends[position]
        behind = send is not None and send.direction == early.direction and order[send.tensor_id] < turn
        (after if behind else before)[position].append(early)
    unfinished: dict[Direction, Transfer] = {}  # the latest send of each direction
    for position, (span, receive, send) in enumerate(zip(spans, receives, sends, strict=True)):
        yield from before[position]
        if receive is not None:
            yield Wait(receive)
        yield span.action
        if send is not None:
            if send.direction in unfinished:
                yield Wait(unfinished[send.direction])
            yield send
            unfinished[send.direction] = send
        yield from after[position]
    yield from map(Wait, unfinished.values())

"""What an executor does for a table, record by record: which transfers it posts when, what it waits for, what it
computes.

Activations go from a rank to the next one (from the last to the first, which holds the next chunk), gradients to the
previous one, and each direction has a communicator of its own. A communicator takes what a rank posts to it one after
the other, and a send ends no sooner than its receive has begun, so the two ends of all transfers must come in one
order. They do:

- Let T be the time at which a transfer's sender has computed it in a step of equal stage times with short transfers.
  Every rank posts what it has to post to a communicator in the order of T (of equal T: of the sender's stage).
- So nothing waits in a circle. Of all transfers that are still to come, the one of smallest T stands first on both of
  its ranks, and whatever its sender has yet to wait for has a smaller T.
- A send is posted when its action is done, a receive before the action during which its T passes: early enough for the
  sender, and not so early that it holds memory (on a GPU also a few multiprocessors) for nothing.
- A send is waited for before the next one in its direction: at most one output is kept besides the newest.

A table that cannot be performed at all (`simulate` refuses it) has no such records. No torch import.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from megalite.pipeline.actions import Action, Schedule
from megalite.pipeline.simulator import simulate
from megalite.pipeline.timeline import Span, equal_durations

Direction = Literal["forward", "backward"]
STEP, FLIGHT = 4, 1  # of the order's equal stage times: a forward pass or half a backward pass, and a transfer


class Transfer(NamedTuple):
    """One tensor between this rank and the pipeline rank `peer`.

    `chunk` is this rank's chunk: the one whose output it sends (an activation, or the gradient of its input), or whose
    input it receives (an activation, or the gradient of its output). `number` is the tensor's own in a step, the same
    on both ranks.
    """

    role: Literal["send", "receive"]
    direction: Direction  # which communicator
    peer: int
    chunk: int
    microbatch: int
    number: int


class Wait(NamedTuple):
    """Go on when the transfer, issued before, is done."""

    transfer: Transfer


Record = Action | Transfer | Wait  # compute the action; issue the transfer and go on; wait
Program = tuple[Record, ...]


def programs(schedule: Schedule) -> tuple[Program, ...]:
    """What each pipeline rank does in a step. Raises `CircleError` where actions of the table wait for each other."""
    ideal = simulate(schedule, equal_durations(schedule, STEP, STEP, STEP), FLIGHT)
    order: dict[int, tuple[float, int]] = {}  # by number: what transfers of one direction are ordered by
    for rank, spans in enumerate(ideal.ranks):
        for action, _, end in spans:
            if (number := schedule.made(rank, action)) is not None:
                order[number] = end, schedule.stage(rank, action.chunk)
    return tuple(tuple(_program(schedule, rank, spans, order)) for rank, spans in enumerate(ideal.ranks))


def input_of(schedule: Schedule, rank: int, action: Action) -> Transfer | None:
    """What the action needs from another rank."""
    number = schedule.needed(rank, action)
    if number is None:
        return None
    if action.kind == "forward":
        return Transfer("receive", "forward", (rank - 1) % schedule.pp, action.chunk, action.microbatch, number)
    return Transfer("receive", "backward", (rank + 1) % schedule.pp, action.chunk, action.microbatch, number)


def output_of(schedule: Schedule, rank: int, action: Action) -> Transfer | None:
    """What another rank needs from the action."""
    number = schedule.made(rank, action)
    if number is None:
        return None
    if action.kind == "forward":
        return Transfer("send", "forward", (rank + 1) % schedule.pp, action.chunk, action.microbatch, number)
    return Transfer("send", "backward", (rank - 1) % schedule.pp, action.chunk, action.microbatch, number)


def _program(
    schedule: Schedule, rank: int, spans: Sequence[Span], order: Mapping[int, tuple[float, int]]
) -> Iterator[Record]:
    inputs = [input_of(schedule, rank, span.action) for span in spans]
    outputs = [output_of(schedule, rank, span.action) for span in spans]
    receives = _receives(inputs, outputs, [span.start for span in spans], order)
    unfinished: dict[Direction, Transfer] = {}  # the latest send of each direction
    for position, (span, needed, made) in enumerate(zip(spans, inputs, outputs, strict=True)):
        yield from receives.get((position, "before"), ())
        if needed is not None:
            yield Wait(needed)
        yield span.action
        if made is not None:
            if made.direction in unfinished:
                yield Wait(unfinished[made.direction])
            yield made
            unfinished[made.direction] = made
        yield from receives.get((position, "after"), ())
    yield from map(Wait, unfinished.values())


def _receives(
    inputs: Sequence[Transfer | None],
    outputs: Sequence[Transfer | None],
    starts: Sequence[float],
    order: Mapping[int, tuple[float, int]],
) -> dict[tuple[int, Literal["before", "after"]], list[Transfer]]:
    """The receives of a rank, by the position of the action before or after which they are posted.

    That is before the last action which the rank starts before the sender is done, unless that action sends to the same
    communicator first.
    """
    posted: dict[tuple[int, Literal["before", "after"]], list[Transfer]] = {}
    for receive in sorted((one for one in inputs if one is not None), key=lambda one: order[one.number]):
        turn = order[receive.number]
        position = max(bisect_left(starts, turn[0]) - 1, 0)
        output = outputs[position]
        after = output is not None and output.direction == receive.direction and order[output.number] < turn
        posted.setdefault((position, "after" if after else "before"), []).append(receive)
    return posted

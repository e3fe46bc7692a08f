"""Computes when each rank does what: every action starts when its rank is free and its input has arrived.

Transfers wait for nothing but the computation before them, so the result is the best that a table can reach;
`rehearse` times the transfers as an executor issues them. No torch import.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megalite.pipeline.actions import Action, ActionKind, Flaw, Schedule

Durations = Mapping[tuple[int, int, ActionKind], float]  # (rank, chunk, kind) -> time of such an action
Event = int  # something that happens once and that others may wait for
Task = tuple[Event | None, float, Event | None]  # what it waits for, how long it takes, what happens at its end


class Span(NamedTuple):
    """One action, from its start to its end."""

    action: Action
    start: float
    end: float


class CircleError(Exception):
    """Actions of a table wait for each other. `flaws` are the actions at which ranks wait for ever."""

    def __init__(self, flaws: list[Flaw]) -> None:
        super().__init__("; ".join(map(str, flaws)))
        self.flaws = flaws


def equal_durations(
    schedule: Schedule, forward: float = 1, backward_input: float = 1, backward_weight: float = 1
) -> Durations:
    """Every chunk takes these times; a whole backward pass takes as long as its two halves."""
    times: dict[ActionKind, float] = {
        "forward": forward,
        "backward": backward_input + backward_weight,
        "backward-input": backward_input,
        "backward-weight": backward_weight,
    }
    chunks = ((rank, chunk) for rank in range(schedule.pp) for chunk in range(schedule.vpp))
    return {(rank, chunk, kind): time for rank, chunk in chunks for kind, time in times.items()}


def simulate(schedule: Schedule, durations: Durations, transfer: float = 0) -> tuple[tuple[Span, ...], ...]:
    """The spans of every rank, all ranks beginning at 0; `transfer` is the time from one rank to the next.

    Chunks and microbatches of the actions must be in range. Raises CircleError.
    """
    sent, received = schedule.sent_tensor_id, schedule.received_tensor_id
    starts, stuck = run_queues(
        [
            [(received(rank, each), durations[rank, each.chunk, each.kind], sent(rank, each)) for each in actions]
            for rank, actions in enumerate(schedule.ranks)
        ],
        delay=transfer,
    )
    if stuck:
        done = [len(line) for line in starts]
        raise CircleError([_waiting(schedule, rank, done, stuck[rank]) for rank in sorted(stuck)])
    return tuple(
        tuple(
            Span(each, start, start + durations[rank, each.chunk, each.kind])
            for each, start in zip(actions, starts[rank], strict=True)
        )
        for rank, actions in enumerate(schedule.ranks)
    )


def run_queues(queues: Sequence[Iterable[Task]], delay: float = 0) -> tuple[list[list[float]], dict[int, Event]]:
    """The start of every task that runs, and for each queue that cannot end the event that never happens for it.

    A queue does its tasks one after the other. An event is known to others `delay` after it happened; no two queues
    wait for the same one.
    """
    starts: list[list[float]] = [[] for _ in queues]
    clocks: list[float] = [0] * len(queues)
    left = [iter(queue) for queue in queues]
    known: dict[Event, float] = {}
    waiting: dict[Event, tuple[int, Task]] = {}
    ready: list[tuple[int, Task | None]] = [(number, None) for number in range(len(queues))]
    while ready:
        number, task = ready.pop()
        clock, begun, tasks = clocks[number], starts[number], left[number]
        if task is None:
            task = next(tasks, None)
        while task is not None:
            needs, time, gives = task
            if needs is not None:
                arrival = known.get(needs)
                if arrival is None:
                    waiting[needs] = number, task
                    break
                clock = max(clock, arrival)
            begun.append(clock)
            clock += time
            if gives is not None:
                known[gives] = clock + delay
                if gives in waiting:
                    ready.append(waiting.pop(gives))
            task = next(tasks, None)
        clocks[number] = clock
    return starts, {number: event for event, (number, _) in waiting.items()}


def _waiting(schedule: Schedule, rank: int, done: Sequence[int], tensor_id: int) -> Flaw:
    """Why a rank does not come to its end."""
    sender, microbatch = divmod(tensor_id, schedule.microbatches)
    backward, stage = divmod(sender, schedule.stages)
    chunk, source = divmod(stage, schedule.pp)
    at, actions = done[source], schedule.ranks[source]
    there = f"which stands at action {at} ({actions[at]})" if at < len(actions) else "which is done"
    reason = f"deadlock: it waits for {chunk}{'B' if backward else 'F'}{microbatch} of rank {source}, {there}"
    return Flaw(rank, done[rank], schedule.ranks[rank][done[rank]], reason)

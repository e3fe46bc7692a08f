"""Performs the programs of all ranks without computing anything: do all of them come to their end, and when?

A communicator is modelled as strictly as possible: it takes what a rank posts to it one after the other, and a transfer
takes place when both of its ranks have come to it (rendezvous). NCCL promises no more than that, gloo more.
No torch import.
"""

from collections.abc import Callable, Hashable, Sequence

from megalite.pipeline.actions import Action, Flaw, Schedule
from megalite.pipeline.simulator import Durations, Event, Span, Task, run_queues
from megalite.pipeline.transfers import Program, Record, Transfer, Wait

Communicator = Callable[[int, Transfer], Hashable]  # which one a rank posts a transfer to
_POSTED, _REACHED, _DONE = range(3)  # events of an end of a transfer: posted, first on its communicator, done


def one_for_each_direction(rank: int, transfer: Transfer) -> Hashable:
    """What the order of the records is made for."""
    return transfer.direction


def rehearse(
    schedule: Schedule,
    programs: Sequence[Program],
    durations: Durations,
    transfer: float = 0,
    communicator: Communicator = one_for_each_direction,
) -> tuple[tuple[tuple[Span, ...], ...], list[Flaw]]:
    """The spans of each rank, all beginning at 0, and for each rank that never ends the transfer that it waits for.

    `transfer` is the time that one takes once it begins. Each rank is a queue of tasks, and so is each communicator on
    each of its ranks.
    """
    posts: dict[tuple[int, Hashable], list[Transfer]] = {}
    for rank, program in enumerate(programs):
        for record in program:
            if isinstance(record, Transfer):
                posts.setdefault((rank, communicator(rank, record)), []).append(record)
    ranks = [[_task_of(record, durations, rank) for record in program] for rank, program in enumerate(programs)]
    meetings = [[task for each in line for task in _meeting(each, transfer)] for line in posts.values()]
    starts, stuck = run_queues([*ranks, *meetings])
    spans = tuple(
        tuple(
            Span(record, start, start + durations[rank, record.chunk, record.kind])
            for record, start in zip(program, starts[rank], strict=False)
            if isinstance(record, Action)
        )
        for rank, program in enumerate(programs)
    )
    flaws = []
    for rank in sorted(number for number in stuck if number < schedule.pp):
        position, record = len(spans[rank]), programs[rank][len(starts[rank])]
        assert isinstance(record, Wait)
        wait = record.transfer
        queue = rank, communicator(rank, wait)
        first = posts[queue][len(starts[schedule.pp + [*posts].index(queue)]) // 2]
        behind = "" if first is wait else f", behind what it posted first to the same communicator: {first}"
        action = schedule.ranks[rank][position] if position < len(schedule.ranks[rank]) else None
        where = None if action is None else position
        flaws.append(Flaw(rank, where, action, f"deadlock: it waits to {wait}{behind}"))
    return spans, flaws


def _event(transfer: Transfer, what: int, *, peer: bool = False) -> Event:
    """The number of what happens to this end of a transfer, or to its peer's."""
    return (transfer.tensor_id * 2 + ((transfer.role == "send") != peer)) * 3 + what


def _task_of(record: Record, durations: Durations, rank: int) -> Task:
    """What a rank does: it computes, posts, or waits until a transfer is done."""
    if isinstance(record, Action):
        return None, durations[rank, record.chunk, record.kind], None
    if isinstance(record, Transfer):
        return None, 0, _event(record, _POSTED)
    return _event(record.transfer, _DONE), 0, None


def _meeting(transfer: Transfer, time: float) -> tuple[Task, Task]:
    """What a communicator does on one rank: it comes to the transfer, then meets the other end."""
    return (
        (_event(transfer, _POSTED), 0, _event(transfer, _REACHED)),
        (_event(transfer, _REACHED, peer=True), time, _event(transfer, _DONE)),
    )

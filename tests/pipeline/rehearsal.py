"""Performs the instructions of all ranks without computing anything: do all of them come to their end, and when?

A communicator is modelled as strictly as possible: it takes what a rank posts to it one after the other, and a transfer
takes place when both of its ranks have come to it (rendezvous). NCCL promises no more than that, gloo more.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence

from megalite.pipeline.actions import Action, Schedule
from megalite.pipeline.checker import Flaw
from megalite.pipeline.simulator import Durations, Span
from megalite.pipeline.transfers import Instruction, Transfer, Wait

Event = int  # something that happens once and that others may wait for
Task = tuple[Event | None, float, Event | None]  # what it waits for, how long it takes, what happens at its end
Communicator = Callable[[int, Transfer], Hashable]  # which one a rank posts a transfer to
_POSTED, _REACHED, _DONE = range(3)  # events of an end of a transfer: posted, first on its communicator, done


def one_for_each_direction(rank: int, transfer: Transfer) -> Hashable:
    """What the order of the instructions is made for."""
    return transfer.direction


def rehearse(
    schedule: Schedule,
    instructions: Sequence[tuple[Instruction, ...]],
    durations: Durations,
    transfer: float = 0,
    communicator: Communicator = one_for_each_direction,
) -> tuple[tuple[tuple[Span, ...], ...], list[Flaw]]:
    """The spans of each rank, all beginning at 0, and for each rank that never ends the transfer that it waits for.

    `transfer` is the time that one takes once it begins. Each rank is a queue of tasks, and so is each communicator on
    each of its ranks.
    """
    posts: dict[tuple[int, Hashable], list[Transfer]] = {}
    for rank, program in enumerate(instructions):
        for record in program:
            if isinstance(record, Transfer):
                posts.setdefault((rank, communicator(rank, record)), []).append(record)
    ranks = [[_task_of(record, durations, rank) for record in program] for rank, program in enumerate(instructions)]
    encounters = [[task for each in line for task in _encounter(each, transfer)] for line in posts.values()]
    starts, stuck = run_queues([*ranks, *encounters])
    spans = tuple(
        tuple(
            Span(record, start, start + durations[rank, record.chunk, record.kind])
            for record, start in zip(program, starts[rank], strict=False)
            if isinstance(record, Action)
        )
        for rank, program in enumerate(instructions)
    )
    flaws = []
    for rank in sorted(number for number in stuck if number < schedule.pp):
        position, record = len(spans[rank]), instructions[rank][len(starts[rank])]
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


def _task_of(record: Instruction, durations: Durations, rank: int) -> Task:
    """What a rank does: it computes, posts, or waits until a transfer is done."""
    if isinstance(record, Action):
        return None, durations[rank, record.chunk, record.kind], None
    if isinstance(record, Transfer):
        return None, 0, _event(record, _POSTED)
    return _event(record.transfer, _DONE), 0, None


def _encounter(transfer: Transfer, time: float) -> tuple[Task, Task]:
    """What a communicator does on one rank: it comes to the transfer, then meets the other end."""
    return (
        (_event(transfer, _POSTED), 0, _event(transfer, _REACHED)),
        (_event(transfer, _REACHED, peer=True), time, _event(transfer, _DONE)),
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

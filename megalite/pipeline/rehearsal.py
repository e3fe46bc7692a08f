"""Performs the records of all ranks without computing anything: do all of them come to their end, and when?

A communicator is read as strictly as can be: it takes what a rank posts to it one after the other, and a transfer
takes place when both of its ranks have come to it (rendezvous). NCCL promises no more than that, gloo more.
No torch import.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from megalite.pipeline.actions import Action, Flaw, Schedule
from megalite.pipeline.timeline import Durations, Span, Timeline
from megalite.pipeline.transfers import Program, Transfer

Communicator = Callable[[int, Transfer], Hashable]  # which one a rank posts a transfer to


def one_for_each_direction(rank: int, transfer: Transfer) -> Hashable:
    """What the order of the records is made for."""
    return transfer.direction


@dataclass(frozen=True)
class Rehearsal:
    """What was performed, and why not all of it: `flaws` are the waits that form a circle, one after the other."""

    timeline: Timeline
    flaws: tuple[Flaw, ...]


def rehearse(
    schedule: Schedule,
    programs: Sequence[Program],
    durations: Durations,
    transfer: float = 0,
    communicator: Communicator = one_for_each_direction,
) -> Rehearsal:
    """The programs of a schedule's ranks, all beginning at 0; `transfer` is the time that one takes once it begins."""
    performance = _Performance(schedule, programs, durations, transfer, communicator)
    performance.run()
    spans = tuple(map(tuple, performance.spans))
    timeline = Timeline(schedule.name, schedule.vpp, schedule.microbatches, spans)
    return Rehearsal(timeline, tuple(performance.circle()))


@dataclass(eq=False, slots=True)
class _End:
    """One rank's end of a transfer. `begun`: when it was posted and first on its communicator; `done`: both None
    until then."""

    rank: int
    transfer: Transfer
    communicator: Hashable
    posted: float
    begun: float | None = None
    done: float | None = None


class _Performance:
    def __init__(
        self,
        schedule: Schedule,
        programs: Sequence[Program],
        durations: Durations,
        transfer: float,
        communicator: Communicator,
    ) -> None:
        self.schedule, self.programs, self.durations = schedule, programs, durations
        self.transfer, self.communicator = transfer, communicator
        self.at = [0] * schedule.pp
        self.clock: list[float] = [0] * schedule.pp
        self.spans: list[list[Span]] = [[] for _ in programs]
        self.sends: dict[int, _End] = {}  # by number, all that were posted
        self.receives: dict[int, _End] = {}
        self.queues: dict[tuple[int, Hashable], deque[_End]] = defaultdict(deque)
        self.awaited: dict[int, _End] = {}  # by rank
        self.ready = list(range(schedule.pp))

    def run(self) -> None:
        while self.ready:
            self._advance(self.ready.pop())

    def _advance(self, rank: int) -> None:
        """All that the rank can do until it has to wait."""
        program = self.programs[rank]
        while self.at[rank] < len(program):
            record = program[self.at[rank]]
            if isinstance(record, Action):
                start = self.clock[rank]
                self.clock[rank] = start + self.durations[rank, record.chunk, record.kind]
                self.spans[rank].append(Span(record, start, self.clock[rank]))
            elif isinstance(record, Transfer):
                self._post(rank, record)
            else:
                end = self._posted(record.transfer)[record.transfer.number]
                if end.done is None:
                    self.awaited[rank] = end
                    return
                self.clock[rank] = max(self.clock[rank], end.done)
            self.at[rank] += 1

    def _post(self, rank: int, transfer: Transfer) -> None:
        end = _End(rank, transfer, self.communicator(rank, transfer), self.clock[rank])
        self._posted(transfer)[transfer.number] = end
        queue = self.queues[rank, end.communicator]
        queue.append(end)
        if len(queue) == 1:
            self._begin(end, end.posted)

    def _begin(self, first: _End, time: float) -> None:
        """The end comes first on its communicator; each transfer that this completes lets two others come first."""
        begun = [(first, time)]
        while begun:
            end, time = begun.pop()
            end.begun = max(end.posted, time)
            other = self._other(end)
            if other is not None and other.begun is not None:
                done = max(end.begun, other.begun) + self.transfer
                begun += [(following, done) for one in (end, other) for following in self._finish(one, done)]

    def _other(self, end: _End) -> _End | None:
        """The other end of the same transfer, if it was posted."""
        return (self.receives if end.transfer.role == "send" else self.sends).get(end.transfer.number)

    def _posted(self, transfer: Transfer) -> dict[int, _End]:
        return self.sends if transfer.role == "send" else self.receives

    def _finish(self, end: _End, time: float) -> list[_End]:
        """The transfer is done on this rank; what comes first on the communicator now."""
        end.done = time
        queue = self.queues[end.rank, end.communicator]
        queue.popleft()
        if self.awaited.get(end.rank) is end:
            self.ready.append(end.rank)
            del self.awaited[end.rank]
        return [queue[0]] if queue else []

    def circle(self) -> list[Flaw]:
        """What waits for each other, or for what is never posted; nothing where all ranks came to their end."""
        seen: list[_End] = []
        flaws: list[Flaw] = []
        end = self.awaited[min(self.awaited)] if self.awaited else None
        while end is not None and end not in seen:
            seen.append(end)
            reason, end = self._obstacle(end)
            flaws.append(self._flaw(seen[-1].rank, reason))
        return flaws if end is None else flaws[seen.index(end) :]

    def _obstacle(self, end: _End) -> tuple[str, _End | None]:
        """What keeps an end from being done, in words, and what must be done before."""
        what, peer = _told(end.transfer), end.transfer.peer
        if end.begun is None:
            first = self.queues[end.rank, end.communicator][0]
            return f"{what}, after what it posted first to the same communicator: {_told(first.transfer)}", first
        other = self._other(end)
        if other is not None:
            first = self.queues[peer, other.communicator][0]
            return f"{what}, before which rank {peer} posted to the same communicator: {_told(first.transfer)}", first
        if peer in self.awaited:
            return f"{what}, which rank {peer} has not come to", self.awaited[peer]
        return f"{what}, which rank {peer} never posts", None

    def _flaw(self, rank: int, reason: str) -> Flaw:
        position, actions = len(self.spans[rank]), self.schedule.ranks[rank]
        at = position if position < len(actions) else None
        return Flaw(rank, at, None if at is None else actions[at], f"deadlock: it waits to {reason}")


def _told(transfer: Transfer) -> str:
    """`receive the activation for 0F3 from rank 1`"""
    sends, activation = transfer.role == "send", transfer.direction == "forward"
    what = f"{'activation' if activation else 'gradient'} {'of' if sends else 'for'}"
    cell = f"{transfer.chunk}{'F' if activation else 'B'}{transfer.microbatch}"
    return f"{transfer.role} the {what} {cell} {'to' if sends else 'from'} rank {transfer.peer}"

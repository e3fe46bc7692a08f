"""How long a table of actions takes: every action starts when its rank is free and its input has arrived.

Transfers wait for nothing but the computation that they carry on, so the result is the best that the table can do;
`rehearsal` performs it with every send and receive in the order in which an executor issues them. No torch import.
"""

from megalite.pipeline.actions import Flaw, Schedule
from megalite.pipeline.timeline import Durations, Span, Timeline


class CircleError(Exception):
    """Actions of a table wait for each other. `flaws` are the actions at which ranks stand for ever."""

    def __init__(self, flaws: list[Flaw]) -> None:
        super().__init__("; ".join(map(str, flaws)))
        self.flaws = flaws


def simulate(schedule: Schedule, durations: Durations, transfer: float = 0) -> Timeline:
    """Start and end of every action, all ranks beginning at 0; `transfer` is the time from one rank to the next.

    Chunks and microbatches of the actions must be in range. Raises CircleError.
    """
    run = _Run(schedule, durations, transfer)
    ready = list(range(schedule.pp))
    while ready:
        ready += run.advance(ready.pop())
    if flaws := run.standing():
        raise CircleError(flaws)
    spans = tuple(map(tuple, run.spans))
    return Timeline(schedule.name, schedule.vpp, schedule.microbatches, spans)


class _Run:
    """A tensor is known when the action that makes it is done; a rank that lacks it is woken then."""

    def __init__(self, schedule: Schedule, durations: Durations, transfer: float) -> None:
        self.schedule, self.durations, self.transfer = schedule, durations, transfer
        self.spans: list[list[Span]] = [[] for _ in schedule.ranks]
        self.clock: list[float] = [0] * schedule.pp
        self.known: dict[int, float] = {}  # number of a tensor -> when it is there
        self.waiting: dict[int, int] = {}  # number of a tensor -> the rank that lacks it

    def advance(self, rank: int) -> list[int]:
        """Perform all that the rank can, and say which ranks that wakes."""
        woken, spans, schedule = [], self.spans[rank], self.schedule
        for action in schedule.ranks[rank][len(spans) :]:
            start = self.clock[rank]
            needed = schedule.needed(rank, action)
            if needed is not None:
                arrival = self.known.get(needed)
                if arrival is None:
                    self.waiting[needed] = rank
                    break
                start = max(start, arrival)
            end = start + self.durations[rank, action.chunk, action.kind]
            self.clock[rank] = end
            spans.append(Span(action, start, end))
            made = schedule.made(rank, action)
            if made is not None:
                self.known[made] = end + self.transfer
                if made in self.waiting:
                    woken.append(self.waiting.pop(made))
        return woken

    def standing(self) -> list[Flaw]:
        """The ranks that have not come to their end, and why."""
        flaws = []
        for rank in sorted(self.waiting.values()):
            position = len(self.spans[rank])
            action = self.schedule.ranks[rank][position]
            before = 1 if action.kind == "forward" else -1
            chunk, source = divmod(self.schedule.stage(rank, action.chunk) - before, self.schedule.pp)
            what = f"{chunk}{'F' if action.kind == 'forward' else 'B'}{action.microbatch}"
            at, actions = len(self.spans[source]), self.schedule.ranks[source]
            there = f"which stands at action {at} ({actions[at]})" if at < len(actions) else "which is done"
            reason = f"deadlock: it waits for {what} of rank {source}, {there}"
            flaws.append(Flaw(rank, position, action, reason))
        return flaws

"""Computes when each rank does what: every action starts when its rank is free and its input has arrived.

Transfers wait for nothing but the computation before them, so the result is the best that a schedule can reach.
No torch import.
"""

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

from megalite.pipeline.actions import LETTERS, Action, ActionKind, Schedule

Durations = Mapping[tuple[int, int, ActionKind], float]  # (rank, chunk, kind) -> time of such an action


class Span(NamedTuple):
    """One action, from its start to its end."""

    action: Action
    start: float
    end: float


def equal_durations(schedule: Schedule, time: float = 1) -> Durations:
    """Every chunk takes this time for a forward pass or half a backward pass, twice as long for a whole one."""
    actions = product(range(schedule.pp), range(schedule.vpp), LETTERS)
    return {(rank, chunk, kind): time * (2 if kind == "backward" else 1) for rank, chunk, kind in actions}


def simulate(schedule: Schedule, durations: Durations, transfer: float = 0) -> tuple[tuple[Span, ...], ...]:
    """The spans of every rank, all ranks beginning at 0; `transfer` is the time from one rank to the next.

    Chunks and microbatches of the actions must be in range. Ranks that wait for each other have the spans until there.
    """
    ranks: list[list[Span]] = [[] for _ in schedule.ranks]
    arrivals: dict[int, float] = {}  # by tensor
    waiting: dict[int, int] = {}  # the rank that waits for a tensor
    ready = [*range(schedule.pp)]
    while ready:
        rank = ready.pop()
        actions, done = schedule.ranks[rank], ranks[rank]
        clock = done[-1].end if done else 0
        while len(done) < len(actions):
            action = actions[len(done)]
            needed = schedule.tensor_id("receive", rank, action)
            if needed is not None:
                if needed not in arrivals:
                    waiting[needed] = rank
                    break
                clock = max(clock, arrivals[needed])
            done.append(Span(action, clock, clock + durations[rank, action.chunk, action.kind]))
            clock = done[-1].end
            sent = schedule.tensor_id("send", rank, action)
            if sent is not None:
                arrivals[sent] = clock + transfer
                if sent in waiting:
                    ready.append(waiting.pop(sent))
    return tuple(map(tuple, ranks))

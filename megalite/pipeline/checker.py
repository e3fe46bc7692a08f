"""Proves that a table of actions can be performed, or says where and why not.

A table is sound where each chunk takes each microbatch forward and backward exactly once and in their order (so that
gradients are summed in one order), no rank holds more activations than the schedule means it to, no actions wait for
each other, and all transfers come to their end in the exact order in which an executor posts them, even if every send
waits for its receive. The cost is linear in the number of actions. No torch import.
"""

from collections.abc import Iterator
from typing import Literal

from megalite.pipeline.actions import Action, Flaw, Kind, Schedule
from megalite.pipeline.rehearsal import Communicator, one_for_each_direction, rehearse
from megalite.pipeline.simulator import CircleError
from megalite.pipeline.timeline import equal_durations
from megalite.pipeline.transfers import programs

Pass = Literal["forward", "backward", "weight"]  # what every microbatch needs once from every chunk
PASSES: dict[Kind, tuple[Pass, ...]] = {
    "forward": ("forward",),
    "backward": ("backward", "weight"),
    "backward-input": ("backward",),
    "backward-weight": ("weight",),
}
BEFORE: dict[Pass, Pass] = {"backward": "forward", "weight": "backward"}
LETTER: dict[Pass, str] = {"forward": "F", "backward": "B", "weight": "W"}
SHOWN = 3  # missing actions that are named


def check(schedule: Schedule, communicator: Communicator = one_for_each_direction) -> list[Flaw]:
    """Everything that is wrong with the table, in the order of ranks; of what can only be judged where each rank by
    itself is right, one circle. `communicator` says which transfers share one."""
    flaws = [flaw for rank in range(schedule.pp) for flaw in _flaws_of_rank(schedule, rank)]
    if flaws:
        return flaws
    try:
        performed = programs(schedule)
    except CircleError as error:
        return error.flaws
    return list(rehearse(schedule, performed, equal_durations(schedule), communicator=communicator).flaws)


def _flaws_of_rank(schedule: Schedule, rank: int) -> Iterator[Flaw]:
    """What can be told from the actions of one rank."""
    done: dict[tuple[Pass, int, int], int] = {}  # -> at which position
    following: dict[tuple[Pass, int], int] = {}  # the microbatch whose turn it is
    held, put_off = 0, 0
    most = None if schedule.most_in_flight is None else schedule.most_in_flight[rank]
    together = None if schedule.most_together is None else schedule.most_together[rank]
    for position, action in enumerate(schedule.ranks[rank]):
        if reason := _not_there(schedule, action) or _out_of_turn(action, done, following):
            yield Flaw(rank, position, action, reason)
        for one in PASSES[action.kind]:
            done.setdefault((one, action.chunk, action.microbatch), position)
            turn = following.get((one, action.chunk), 0)
            following[one, action.chunk] = max(turn, action.microbatch + 1)
        held += (action.kind == "forward") - ("backward" in PASSES[action.kind])
        if most is not None and held > most:
            yield Flaw(rank, position, action, f"{held} activations are held; in {schedule.name} it is {most} at most")
            most = together = None  # once is enough
        put_off += (action.kind == "backward-input") - (action.kind == "backward-weight")
        if together is not None and held + put_off > together:
            waiting = f"{held} activations and what {put_off} weight gradients need are held"
            yield Flaw(rank, position, action, f"{waiting}; in {schedule.name} it is {together} at most")
            most = together = None
    yield from _missing(schedule, rank, done)


def _not_there(schedule: Schedule, action: Action) -> str:
    """What is not part of the schedule, whatever the order."""
    for name, value, size in (
        ("chunk", action.chunk, schedule.vpp),
        ("microbatch", action.microbatch, schedule.microbatches),
    ):
        if not 0 <= value < size:
            return f"there is no {name} {value}: there {'is' if size == 1 else 'are'} {size}, counted from 0"
    if schedule.forward_only and action.kind != "forward":
        return "there are forward passes alone"
    return ""


def _out_of_turn(action: Action, done: dict[tuple[Pass, int, int], int], following: dict[tuple[Pass, int], int]) -> str:
    """What is wrong with an action at this place."""
    chunk, microbatch = action.chunk, action.microbatch
    for one in PASSES[action.kind]:
        if (earlier := done.get((one, chunk, microbatch))) is not None:
            return f"its {one} pass has been done at action {earlier}"
    first = PASSES[action.kind][0]
    before = BEFORE.get(first)
    if before is not None and (before, chunk, microbatch) not in done:
        return f"its {before} pass has not been done"
    turn = following.get((first, chunk), 0)
    if microbatch > turn:
        return f"comes before {chunk}{LETTER[first]}{turn}: a chunk takes the microbatches in their order"
    return ""


def _missing(schedule: Schedule, rank: int, done: dict[tuple[Pass, int, int], int]) -> Iterator[Flaw]:
    passes: tuple[Pass, ...] = ("forward",) if schedule.forward_only else ("forward", "backward", "weight")
    for chunk in range(schedule.vpp):
        for one in passes:
            there = range(schedule.microbatches)
            left = [microbatch for microbatch in there if (one, chunk, microbatch) not in done]
            if one == "weight":  # where the backward pass is missing altogether, that says it
                left = [microbatch for microbatch in left if ("backward", chunk, microbatch) in done]
            if left:
                named = " ".join(f"{chunk}{LETTER[one]}{microbatch}" for microbatch in left[:SHOWN])
                more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
                yield Flaw(rank, None, None, f"missing: {named}{more}")

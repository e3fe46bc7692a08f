"""Proves that a schedule can be performed, or says where and why not.

A schedule is sound where each chunk takes each microbatch forward and backward exactly once and in their order (so that
gradients are summed in one order), no rank holds more activations than the schedule allows, and no actions wait for
each other. The transfers of a sound schedule come to their end, even if every send waits for its receive: transfers.py
says why. The cost is linear in the number of actions. No torch import.
"""

from collections.abc import Mapping
from typing import Literal

from megalite.pipeline.actions import Action, ActionKind, Flaw, Schedule
from megalite.pipeline.simulator import CircleError, equal_durations, simulate

Pass = Literal["forward", "backward", "weight"]  # what every microbatch needs once from every chunk
PASSES: dict[ActionKind, tuple[Pass, ...]] = {
    "forward": ("forward",),
    "backward": ("backward", "weight"),
    "backward-input": ("backward",),
    "backward-weight": ("weight",),
}
BEFORE: dict[Pass, Pass] = {"backward": "forward", "weight": "backward"}
LETTER: dict[Pass, str] = {"forward": "F", "backward": "B", "weight": "W"}


def check(schedule: Schedule) -> list[Flaw]:
    """What is wrong with the schedule: the first flaw of each rank; where each rank by itself is right, all ranks that
    never end."""
    flaws = [flaw for rank in range(schedule.pp) if (flaw := _first_flaw(schedule, rank)) is not None]
    if not flaws:
        try:
            simulate(schedule, equal_durations(schedule))
        except CircleError as error:
            return error.flaws
    return flaws


def _first_flaw(schedule: Schedule, rank: int) -> Flaw | None:
    """What the actions of one rank show."""
    passes: tuple[Pass, ...] = ("forward",) if schedule.forward_only else ("forward", "backward", "weight")
    turn = {(each, chunk): 0 for chunk in range(schedule.vpp) for each in passes}  # the microbatch that comes next
    held, put_off = 0, 0
    most, most_together = (
        None if bounds is None else bounds[rank] for bounds in (schedule.most_in_flight, schedule.most_together)
    )
    for position, action in enumerate(schedule.ranks[rank]):
        kind, chunk, _ = action
        if reason := _out_of_turn(schedule, action, turn):
            return Flaw(rank, position, action, reason)
        for each in PASSES[kind]:
            turn[each, chunk] += 1
        held += (kind == "forward") - ("backward" in PASSES[kind])
        put_off += (kind == "backward-input") - (kind == "backward-weight")
        if most is not None and held > most:
            reason = f"{held} activations are held; in {schedule.name} it is {most} at most"
            return Flaw(rank, position, action, reason)
        if most_together is not None and held + put_off > most_together:
            waiting = f"{held} activations and what {put_off} weight gradients need are held"
            return Flaw(rank, position, action, f"{waiting}; in {schedule.name} it is {most_together} at most")
    left = [f"{chunk}{LETTER[each]}{due}" for (each, chunk), due in turn.items() if due < schedule.microbatches]
    return Flaw(rank, None, None, f"ends before {' and '.join(left)}") if left else None


def _out_of_turn(schedule: Schedule, action: Action, turn: Mapping[tuple[Pass, int], int]) -> str:
    """What is wrong with an action at this place."""
    kind, chunk, microbatch = action
    for each in PASSES[kind]:
        due = turn.get((each, chunk))
        if due is None:
            only = ", of forward passes alone" if schedule.forward_only else ""
            return f"is not part of the schedule, whose chunks are 0 to {schedule.vpp - 1}{only}"
        if microbatch >= schedule.microbatches:
            return f"there is no microbatch {microbatch}: there are {schedule.microbatches}, counted from 0"
        if microbatch < due:
            return f"its {each} pass has been done"
        if microbatch > due:
            return f"comes before {chunk}{LETTER[each]}{due}: a chunk takes the microbatches in their order"
    before = BEFORE.get(PASSES[kind][0])
    return f"its {before} pass has not been done" if before and turn[before, chunk] <= microbatch else ""

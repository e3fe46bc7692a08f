"""Proves that a schedule can be performed, or says where and why not.

A schedule is sound where each chunk takes each microbatch forward and backward exactly once and in their order (so that
gradients are summed in one order), and no actions wait for each other. The transfers of a sound schedule come to their
end, even if every send waits for its receive: transfers.py says why. The cost is linear in the number of actions. No
torch import.
"""

from dataclasses import dataclass

from megalite.pipeline.actions import Action, ActionKind, Schedule
from megalite.pipeline.simulator import equal_durations, simulate

# The passes that every microbatch needs once from every chunk, in this order: forward, backward, weight gradients.
PASSES: dict[ActionKind, str] = {"forward": "F", "backward": "BW", "backward-input": "B", "backward-weight": "W"}
BEFORE = {"B": "F", "W": "B"}


@dataclass(frozen=True)
class Flaw:
    """Why a schedule cannot be performed: on `rank`, at `position` of its actions (None: at their end)."""

    rank: int
    position: int | None
    action: Action | None
    reason: str

    def __str__(self) -> str:
        place = "" if self.position is None else f", action {self.position} ({self.action})"
        return f"rank {self.rank}{place}: {self.reason}"


def check(schedule: Schedule) -> list[Flaw]:
    """The first flaw of each rank; where each rank by itself is right, all ranks that never end."""
    flaws = [flaw for rank in range(schedule.pp) if (flaw := _first_flaw(schedule, rank)) is not None]
    if flaws:
        return flaws
    for rank, spans in enumerate(simulate(schedule, equal_durations(schedule))):
        at, actions = len(spans), schedule.ranks[rank]
        if at < len(actions):
            flaws.append(Flaw(rank, at, actions[at], "deadlock: what it is to receive is never sent"))
    return flaws


def _first_flaw(schedule: Schedule, rank: int) -> Flaw | None:
    """The first flaw that the actions of one rank show."""
    trains = any(action.kind != "forward" for actions in schedule.ranks for action in actions)
    passes = "FBW" if trains else "F"
    turn = {(each, chunk): 0 for chunk in range(schedule.vpp) for each in passes}  # the microbatch that comes next
    for position, action in enumerate(schedule.ranks[rank]):
        kind, chunk, microbatch = action
        for each in PASSES[kind]:
            due, before = turn.get((each, chunk)), BEFORE.get(each)
            if due is None or microbatch >= schedule.microbatches:
                whole = f"{schedule.microbatches} microbatches through chunks 0 to {schedule.vpp - 1}"
                return Flaw(rank, position, action, f"is not part of {whole}")
            if microbatch != due:
                rule = "a chunk takes the microbatches in their order"
                return Flaw(rank, position, action, f"{chunk}{each}{due} comes next: {rule}")
            if before is not None and turn[before, chunk] <= microbatch:
                return Flaw(rank, position, action, f"comes before {chunk}{before}{microbatch}")
            turn[each, chunk] += 1
    left = [f"{chunk}{each}{due}" for (each, chunk), due in turn.items() if due < schedule.microbatches]
    return Flaw(rank, None, None, f"ends before {' and '.join(left)}") if left else None

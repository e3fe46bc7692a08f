"""Says whether a schedule can be performed, or where and why not.

In a sound schedule each chunk takes each microbatch forward and backward exactly once and in their order (so that
gradients are summed in one order), and no actions wait for each other. Its transfers come to their end, even if every
send waits for its receive: transfers.py says why. No torch import.
"""

from megalite.pipeline.actions import ActionKind, Schedule
from megalite.pipeline.simulator import equal_durations, simulate

# The passes that every microbatch needs once from every chunk, in this order: forward, backward, weight gradients.
PASSES: dict[ActionKind, str] = {"forward": "F", "backward": "BW", "backward-input": "B", "backward-weight": "W"}
BEFORE = {"B": "F", "W": "B"}


def check(schedule: Schedule) -> list[str]:
    """The first flaw of each rank; where each rank by itself is right, all ranks that never end."""
    flaws = [flaw for rank in range(schedule.pp) if (flaw := _first_flaw(schedule, rank))]
    spans = [] if flaws else simulate(schedule, equal_durations(schedule))
    for rank, (actions, done) in enumerate(zip(schedule.ranks, spans, strict=False)):
        if len(done) < len(actions):
            place = f"rank {rank}, action {len(done)} ({actions[len(done)]})"
            flaws.append(f"{place}: deadlock: what it is to receive is never sent")
    return flaws


def _first_flaw(schedule: Schedule, rank: int) -> str:
    trains = any(action.kind != "forward" for actions in schedule.ranks for action in actions)
    passes, order = "FBW" if trains else "F", "a chunk takes the microbatches in their order"
    turn = {(each, chunk): 0 for chunk in range(schedule.vpp) for each in passes}  # the microbatch that comes next
    for position, (kind, chunk, microbatch) in enumerate(schedule.ranks[rank]):
        place = f"rank {rank}, action {position} ({schedule.ranks[rank][position]})"
        for each in PASSES[kind]:
            due, before = turn.get((each, chunk)), BEFORE.get(each)
            if due is None or microbatch >= schedule.microbatches:
                whole = f"{schedule.microbatches} microbatches through chunks 0 to {schedule.vpp - 1}"
                return f"{place}: is not part of {whole}"
            if microbatch != due:
                return f"{place}: {chunk}{each}{due} comes next: {order}"
            if before is not None and turn[before, chunk] <= microbatch:
                return f"{place}: comes before {chunk}{before}{microbatch}"
            turn[each, chunk] += 1
    left = [f"{chunk}{each}{due}" for (each, chunk), due in turn.items() if due < schedule.microbatches]
    return f"rank {rank}: ends before {' and '.join(left)}" if left else ""

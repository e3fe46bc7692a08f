"""Performs the instructions of all ranks without computing anything: do all of them come to their end, and when?

A communicator is modelled as strictly as possible: it takes what a rank posts to it one after the other, and a transfer
takes place when both of its ranks have come to it (rendezvous). NCCL promises no more than that, gloo more.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence

from megalite.pipeline.actions import Action
from megalite.pipeline.simulator import Durations, Span
from megalite.pipeline.transfers import Instruction, Transfer

Communicator = Callable[[int, Transfer], Hashable]  # which one a rank posts a transfer to


def one_for_each_direction(rank: int, transfer: Transfer) -> Hashable:
    """What the order of the instructions is made for."""
    return transfer.direction


def rehearse(
    programs: Sequence[tuple[Instruction, ...]],
    durations: Durations,
    transfer: float = 0,
    communicator: Communicator = one_for_each_direction,
) -> tuple[tuple[tuple[Span, ...], ...], list[str]]:
    """The spans of each rank, all beginning at 0, and for each rank that never ends the transfer that it waits for.

    `transfer` is the time that a transfer takes once it begins.
    """
    spans: list[list[Span]] = [[] for _ in programs]
    clocks, at = [0.0] * len(programs), [0] * len(programs)
    posted: dict[tuple[int, Hashable], deque[tuple[Transfer, float]]] = defaultdict(deque)
    free: dict[tuple[int, Hashable], float] = defaultdict(float)  # when a communicator is done with all before, by rank
    done: dict[int, float] = {}  # when a tensor has arrived
    performed = -1
    while performed < sum(at) + len(done):
        performed = sum(at) + len(done)
        for rank, program in enumerate(programs):
            for record in program[at[rank] :]:
                if isinstance(record, Action):
                    end = clocks[rank] + durations[rank, record.chunk, record.kind]
                    spans[rank].append(Span(record, clocks[rank], end))
                    clocks[rank] = end
                elif isinstance(record, Transfer):
                    posted[rank, communicator(rank, record)].append((record, clocks[rank]))
                elif record.transfer.tensor_id in done:
                    clocks[rank] = max(clocks[rank], done[record.transfer.tensor_id])
                else:
                    break
                at[rank] += 1
        for (rank, name), queue in [*posted.items()]:
            while queue:
                mine, since = queue[0]
                peer = mine.peer, communicator(mine.peer, mine._replace(peer=rank))
                theirs = posted[peer][0] if posted[peer] else None
                if theirs is None or theirs[0].tensor_id != mine.tensor_id:
                    break
                end = max(since, theirs[1], free[rank, name], free[peer]) + transfer
                done[mine.tensor_id] = free[rank, name] = free[peer] = end
                queue.popleft()
                posted[peer].popleft()
    stuck = [
        f"rank {rank} waits to {program[at[rank]].transfer}"  # type: ignore[union-attr]
        for rank, program in enumerate(programs)
        if at[rank] < len(program)
    ]
    return tuple(map(tuple, spans)), stuck

"""Packs stacks of matrices into rooms of equal size, so that the wall between two rooms never cuts a matrix.

A stack is contiguous, and may reach over walls that fall between its matrices. Plain numbers, no torch.
"""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple


class Packing(NamedTuple):
    room: int  # the size of every room
    starts: list[int]  # of each stack, counted over all rooms


def pack(stacks: Sequence[tuple[int, int]], rooms: int, alignment: int, *, most: int | None = None) -> Packing | None:
    """The smallest rooms found that hold the stacks, (size of a matrix, number of matrices) each; all sizes are
    multiples of `alignment`. None where all rooms together would take more than `most`."""
    largest_first = sorted(range(len(stacks)), key=lambda at: stacks[at], reverse=True)
    total, units = sum(unit * number for unit, number in stacks), {unit for unit, number in stacks if number > 1}
    least = max(-(-total // rooms), stacks[largest_first[0]][0])
    for step in count():
        smallest = -(-(least + least * step // 32) // alignment) * alignment
        if most is not None and smallest * rooms > most:
            return None
        for room in sorted({smallest, *(-(-smallest // unit) * unit for unit in units)}):
            starts = _first_fit([stacks[at] for at in largest_first], room, room * rooms)
            if starts is not None and (most is None or room * rooms <= most):
                return Packing(room, [start for _, start in sorted(zip(largest_first, starts, strict=True))])
    raise AssertionError("unreachable: a room that holds everything is tried in the end")


def _first_fit(stacks: Sequence[tuple[int, int]], room: int, end: int) -> list[int] | None:
    """Where the stacks start in [0, end), each in the first gap that takes it; None: they do not fit."""
    gaps, starts = [(0, end)], []
    for unit, number in stacks:
        size = unit * number
        found = next(
            ((at, start) for at, gap in enumerate(gaps) if (start := _start(*gap, unit, size, room)) >= 0), None
        )
        if found is None:
            return None
        (at, start), (low, high) = found, gaps[found[0]]
        gaps[at : at + 1] = [gap for gap in ((low, start), (start + size, high)) if gap[0] < gap[1]]
        starts.append(start)
    return starts


def _start(low: int, high: int, unit: int, size: int, room: int) -> int:
    """The first place of a stack in a gap at which walls fall between its matrices; -1: none."""
    wall = (low // room + 1) * room
    tried = (low, low + (wall - low) % unit, wall, wall + room % unit)
    return next((start for start in tried if start + size <= high and _is_uncut(start, unit, size, room)), -1)


def _is_uncut(start: int, unit: int, size: int, room: int) -> bool:
    """Whether the walls in the stack at `start` are between matrices: the first, and with it all of them."""
    wall = (start // room + 1) * room - start
    return wall >= size or (wall % unit == 0 and (wall + room >= size or room % unit == 0))

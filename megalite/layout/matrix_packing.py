"""Packs stacks of matrices into rooms of equal size, so that the wall between two rooms never cuts a matrix.

A stack is contiguous, and may reach over walls that fall between its matrices. Plain numbers, no torch.
"""

from collections.abc import Sequence
from itertools import count


def pack(
    stacks: Sequence[tuple[int, int]], rooms: int, alignment: int, *, most: int | None = None
) -> tuple[int, list[int]] | None:
    """The size of the smallest rooms found that hold the stacks, (size of a matrix, number of matrices) each, and the
    start of each stack, counted over all rooms. All sizes are multiples of `alignment`. None where all rooms together
    would take more than `most`."""
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
                return room, [start for _, start in sorted(zip(largest_first, starts, strict=True))]
    raise AssertionError("unreachable: a room that holds everything is tried in the end")


def _first_fit(stacks: Sequence[tuple[int, int]], room: int, end: int) -> list[int] | None:
    """Where the stacks start in [0, end), each in the first gap that takes it; None: they do not fit."""
    gaps, starts = [(0, end)], []
    for unit, number in stacks:
        size = unit * number
        for at, (low, high) in enumerate(gaps):
            wall = (low // room + 1) * room
            tried = (low, low + (wall - low) % unit, wall, wall + room % unit)  # walls may fall between matrices there
            start = next(
                (place for place in tried if place + size <= high and _is_uncut(place, unit, size, room)), None
            )
            if start is not None:
                gaps[at : at + 1] = [gap for gap in ((low, start), (start + size, high)) if gap[0] < gap[1]]
                starts.append(start)
                break
        else:
            return None
    return starts


def _is_uncut(start: int, unit: int, size: int, room: int) -> bool:
    """Whether the walls in the stack at `start` are between matrices: the first, and with it all of them."""
    wall = (start // room + 1) * room - start
    return wall >= size or (wall % unit == 0 and (wall + room >= size or room % unit == 0))

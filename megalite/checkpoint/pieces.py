"""Boxes of logical tensors, the only thing that a checkpoint holds.

A logical tensor is the unsharded one; a rank holds boxes of it. So what one layout wrote, another can read:
data-parallel replicas hold equal boxes, a tensor-parallel shard is one box, and a flat range of a ZeRO-1 buffer is a
few boxes (`boxes`). Nothing is gathered to save.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

Box = tuple[Sequence[int], Sequence[int]]  # offsets and sizes, one of each per dimension


@dataclass(frozen=True, eq=False)
class Piece:
    """The box of logical tensor `name` that starts at `offsets` and has the shape of `tensor`.

    A whole tensor has offsets 0. The tensor may be a view of a larger buffer; loading writes through it.
    """

    name: str
    logical_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def box(self) -> tuple[slice, ...]:
        """The piece as an index into the logical tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.tensor.shape, strict=True))


def boxes(start: int, stop: int, shape: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The elements [start, stop) of a row-major tensor as boxes: (offsets, sizes, first flat index), in flat order.

    Each box is contiguous in the flat range. There are at most 2N-1 for N dimensions: a suffix of one row (N-1 boxes
    by recursion), a block of whole rows, and a prefix of one row (N-1 boxes).
    """
    assert 0 <= start <= stop <= prod(shape), (start, stop, shape)
    if start == stop:
        return []
    if len(shape) == 0:
        return [((), (), 0)]
    row = prod(shape[1:])
    first_whole, last_whole = -(-start // row), stop // row
    if first_whole > last_whole:  # the range lies inside one row
        return _in_row(last_whole, start, stop, shape)
    whole_rows = ((first_whole, *(0 for _ in shape[1:])), (last_whole - first_whole, *shape[1:]), first_whole * row)
    return [
        *_in_row(first_whole - 1, start, first_whole * row, shape),
        *([whole_rows] if first_whole < last_whole else []),
        *_in_row(last_whole, last_whole * row, stop, shape),
    ]


def _in_row(
    index: int, start: int, stop: int, shape: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Boxes of [start, stop), which lies in row `index` of the first dimension."""
    base = index * prod(shape[1:])
    inner = boxes(start - base, stop - base, shape[1:]) if stop > start else []
    return [((index, *offsets), (1, *sizes), base + flat) for offsets, sizes, flat in inner]


def tiling_fault(shape: Sequence[int], parts: Sequence[Box]) -> str | None:
    """What keeps `parts` from covering every element of a tensor of `shape` exactly once; None if they do.

    Boxes that lie inside, do not overlap and have the tensor's volume together leave no gap.
    """
    for offsets, sizes in parts:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"has a part of {len(sizes)} dimensions, not {len(shape)}"
        if any(at < 0 or size < 0 or at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
            return f"has a part that leaves the tensor: {tuple(sizes)} at {tuple(offsets)}"
    volume = sum(prod(sizes) for _, sizes in parts)
    if volume != prod(shape):
        return f"has data for {volume} of its {prod(shape)} elements"
    if len(shape) == 0:
        return None
    # Sweep along the longest dimension: only parts that reach beyond the current one's start can overlap it.
    along = max(range(len(shape)), key=lambda dim: shape[dim])
    active: list[Box] = []
    for part in sorted(parts, key=lambda part: part[0][along]):
        active = [other for other in active if other[0][along] + other[1][along] > part[0][along]]
        if any(overlap(part, other) is not None for other in active):
            return f"has data twice at {tuple(part[0])}"
        active.append(part)
    return None


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    offsets = [max(a, b) for a, b in zip(one[0], other[0], strict=True)]
    ends = [min(a + m, b + n) for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True)]
    sizes = [end - offset for offset, end in zip(offsets, ends, strict=True)]
    return (offsets, sizes) if all(size > 0 for size in sizes) else None

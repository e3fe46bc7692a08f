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


def boxes(start: int, stop: int, shape: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The elements [start, stop) of a row-major tensor as boxes: (offsets, sizes, first flat index), in flat order.

    Each box is contiguous in the flat range: some rows of the outermost dimension that has a row beginning at its first
    element and ending before `stop`. There are at most 2N-1 for N dimensions: the rows grow, then shrink again.
    """
    assert 0 <= start <= stop <= prod(shape), (start, stop, shape)
    if not shape:
        return [((), (), 0)] * (stop - start)
    strides, found = [prod(shape[dim + 1 :]) for dim in range(len(shape))], []
    while start < stop:
        offsets = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        dim = next(dim for dim, row in enumerate(strides) if start % row == 0 and start + row <= stop)
        rows = min((stop - start) // strides[dim], shape[dim] - offsets[dim])
        found.append((offsets, (*[1] * dim, rows, *shape[dim + 1 :]), start))
        start += rows * strides[dim]
    return found


def tiling_fault(shape: Sequence[int], parts: Sequence[Box]) -> str | None:
    """What keeps `parts` from covering every element of a tensor of `shape` exactly once; None if they do.

    Boxes that lie inside, do not overlap and have the tensor's volume together leave no gap.
    """
    for offsets, sizes in parts:
        inside = len(offsets) == len(sizes) == len(shape) and all(
            at >= 0 and size >= 0 and at + size <= whole for at, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            return f"has a part that leaves the tensor: {tuple(sizes)} at {tuple(offsets)}"
    volume = sum(prod(sizes) for _, sizes in parts)
    if volume != prod(shape):
        return f"has data for {volume} of its {prod(shape)} elements"
    if not shape:
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

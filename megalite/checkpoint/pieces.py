"""Boxes of logical tensors, the only thing that a checkpoint holds.

A logical tensor is the unsharded one; a rank holds boxes of it. So what one layout wrote, another can read:
data-parallel replicas hold equal boxes, a tensor-parallel shard is one box, and a flat range of a ZeRO-1 buffer is a
few boxes (`boxes`). Nothing is gathered to save.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
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
    def key(self) -> str:
        """The name in a safetensors file: the logical one, followed by the offsets (`name@8,0`) of a part."""
        is_whole = tuple(self.tensor.shape) == self.logical_shape
        return self.name if is_whole else f"{self.name}@{','.join(map(str, self.offsets))}"


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


def is_tiled(shape: Sequence[int], parts: Iterable[Box]) -> bool:
    """Whether `parts` cover every element of a tensor of `shape` exactly once.

    The number of parts that cover an element is a function of its place. The mixed difference of this function over
    all dimensions is +1 or -1 at the corners of every part, 0 elsewhere, and it determines the function. So the parts
    tile the tensor if and only if their corners add up to those of the tensor.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    ends = [((-1) ** sum(end), end) for end in product((0, 1), repeat=len(shape))]
    for sign, offsets, sizes in ((-1, [0] * len(shape), shape), *((1, *part) for part in parts)):
        if not len(offsets) == len(sizes) == len(shape) or min(sizes, default=0) < 0:
            return False
        for parity, end in ends:
            corners[tuple(at + size * one for at, size, one in zip(offsets, sizes, end, strict=True))] += sign * parity
    return not any(corners.values())


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    offsets = [max(a, b) for a, b in zip(one[0], other[0], strict=True)]
    ends = [min(a + m, b + n) for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True)]
    sizes = [end - offset for offset, end in zip(offsets, ends, strict=True)]
    return (offsets, sizes) if all(size > 0 for size in sizes) else None

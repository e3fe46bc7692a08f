"""Real tensors cut into shards, for tests."""

from torch import Tensor

from megalite.layout.parameters import Shard


def slices(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def cut(whole: Tensor, part: Shard) -> Tensor:
    """What the rank holds of `whole`, box by box."""
    local = whole.new_full(part.shape, -1)
    for box in part.boxes:
        local[slices(box.local_offsets, box.sizes)] = whole[slices(box.offsets, box.sizes)]
    return local

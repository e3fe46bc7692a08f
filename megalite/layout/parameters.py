"""Parameters know who they are: one record per logical parameter of the model, and which part of it a rank holds.

A record holds what is true of the parameter whatever the sizes of the layout: its logical (unsharded) name and shape,
how it starts, whether weight decay touches it, which pipeline stages hold it, which dim is split, and over which groups
its gradient must be summed. `shard` turns a record and an axis size into the boxes of one rank; the counted boxes of
all ranks of the axis tile the logical tensor. Initialisation, gradient sync, norms, checkpoints, imports and exports
all ask here; nothing is stuck onto tensors. The data axes (dp and cp, edp for experts) are not in a record: over them
every parameter is replicated and every gradient partial. No torch import.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

End = Literal["embedding", "loss"]  # the stage that embeds tokens; the one with final norm, head and loss
Group = Literal["tp", "etp", "embedding"]  # embedding: the stages of one pipeline that hold a tied word embedding


@dataclass(frozen=True)
class Split:
    """Cuts `dim` into one contiguous part per rank of the axis, in order of rank.

    Parts are equal; with `uneven`, part i of t is [i * n // t, (i + 1) * n // t). With a `shared_tail` the axis may
    have more ranks than the dim has entries: consecutive ranks then share an entry. They divide its next dim among
    them, but for the last `shared_tail` entries, which each of them holds and for which each has a partial gradient, to
    be summed over them. So grouped queries are divided, and their one key and value copied.
    """

    dim: int
    uneven: bool = False
    shared_tail: int = 0


@dataclass(frozen=True)
class ParameterRecord:
    """One logical parameter.

    `name` carries the global layer index (`blocks.11.mlp.up.weight`), for an expert also its global index, and is the
    name of the `torch.nn.Parameter` in a module that holds the whole model. `std` is the standard deviation of a
    `normal` start, unused otherwise. `place` is the parameter's layer, or the ends of the pipeline that hold a copy of
    it: a tied word embedding is at both, else at one (at none: part of no pipeline). Without a `split` each rank of
    `axis` holds the whole. `partial_over` are the groups whose ranks each have a part of the gradient, to be summed.
    With `precision` "master" the model computes with it in the precision of the masters (a router).
    """

    name: str
    shape: tuple[int, ...]
    init: Literal["normal", "zeros", "ones"]
    std: float
    decay: bool
    place: int | tuple[End, ...] = ()
    split: Split | None = None
    partial_over: tuple[Group, ...] = ()
    expert: int | None = None
    precision: Literal["model", "master"] = "model"

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def axis(self) -> Literal["tp", "etp"]:
        """The axis that `split` refers to."""
        return "tp" if self.expert is None else "etp"


@dataclass(frozen=True)
class ShardBox:
    """The box of the logical tensor that starts at `offsets`; in the rank's own tensor it starts at `local_offsets`.

    `replicas` consecutive ranks of the axis hold it, the first at a multiple of `replicas`. That first one has it
    `counted`: in norms, and wherever else each element must be seen once.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]
    replicas: int = 1
    counted: bool = True

    @property
    def logical(self) -> tuple[slice, ...]:
        """The box as an index into the logical tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def local(self) -> tuple[slice, ...]:
        """The box as an index into the rank's own tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.local_offsets, self.sizes, strict=True))

    def flat(self, shape: tuple[int, ...]) -> range:
        """The box in the rank's own tensor, of `shape`, as a flat range: boxes of a shard follow one another there."""
        start = sum(at * prod(shape[dim + 1 :]) for dim, at in enumerate(self.local_offsets))
        return range(start, start + prod(self.sizes))


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a parameter: a tensor of `shape`, tiled by `boxes`."""

    shape: tuple[int, ...]
    boxes: tuple[ShardBox, ...]


def shard(record: ParameterRecord, size: int, index: int) -> Shard:
    """What rank `index` of `size` along the record's axis holds. That the sizes divide is a config rule."""
    return shard_of(record.shape, record.split, size, index)


def shard_of(shape: tuple[int, ...], split: Split | None, size: int, index: int) -> Shard:
    """What rank `index` of `size` holds of anything of logical `shape`, cut by `split`."""
    assert 0 <= index < size, (index, size)
    if split is None:
        whole = _box(shape, {}, replicas=size, counted=index == 0)
        return Shard(shape, (whole,))
    entries = shape[split.dim]
    if size > entries:
        return _shard_of_entry(shape, split, size, index)
    assert split.uneven or entries % size == 0, (shape, split, size)
    start, stop = index * entries // size, (index + 1) * entries // size
    part = _box(shape, {split.dim: (start, stop - start)})
    return Shard(part.sizes, (part,))


def is_held(record: ParameterRecord, layers: range, *, embedding: bool, loss: bool) -> bool:
    """Whether the stage with these layers, with or without the embedding and the loss, holds the parameter."""
    if isinstance(record.place, int):
        return record.place in layers
    return (embedding and "embedding" in record.place) or (loss and "loss" in record.place)


def is_counted(record: ParameterRecord, *, embedding: bool) -> bool:
    """Whether a stage that holds the parameter is the one that counts it: of a tied embedding, the one that embeds."""
    return embedding or record.place != ("embedding", "loss")


def _shard_of_entry(shape: tuple[int, ...], split: Split, size: int, index: int) -> Shard:
    """The shard of one of several ranks that share an entry: its share of the next dim, and the shared tail."""
    entries, length = shape[split.dim : split.dim + 2]
    sharers, divided = size // entries, length - split.shared_tail
    assert split.shared_tail > 0, (shape, split, size)
    assert size % entries == 0, (shape, split, size)
    assert divided % sharers == 0, (shape, split, size)
    entry, turn = divmod(index, sharers)
    share = divided // sharers
    entry_cut, within = {split.dim: (entry, 1)}, split.dim + 1
    own = _box(shape, {**entry_cut, within: (turn * share, share)})
    tail = _box(
        shape,
        {**entry_cut, within: (divided, split.shared_tail)},
        local={within: share},
        replicas=sharers,
        counted=turn == 0,
    )
    sizes = list(own.sizes)
    sizes[within] += split.shared_tail
    return Shard(tuple(sizes), (own, tail))


def _box(
    shape: tuple[int, ...],
    cuts: Mapping[int, tuple[int, int]],
    *,
    local: Mapping[int, int] | None = None,
    replicas: int = 1,
    counted: bool = True,
) -> ShardBox:
    """The box that is whole but for the dims in `cuts` (offset and size) and, in the local tensor, at `local` or 0."""
    offsets, sizes = zip(*(cuts.get(dim, (0, whole)) for dim, whole in enumerate(shape)), strict=True)
    local_offsets = tuple((local or {}).get(dim, 0) for dim in range(len(shape)))
    return ShardBox(offsets, sizes, local_offsets, replicas, counted)

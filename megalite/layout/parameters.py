"""The record of one logical parameter of the model, and what a rank holds of it.

A record holds what is true of the parameter whatever the sizes of the layout. `shard` turns a record and an axis size
into the boxes of one rank; the counted boxes of all ranks of the axis tile the logical (unsharded) tensor.
Initialisation, gradient sync, norms, checkpoints, imports and exports all ask here; nothing is stuck onto tensors. The
data axes (dp and cp, edp for experts) are not in a record: over them every parameter is replicated and every gradient
partial. No torch import.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from megalite.layout.stages import StageLayers

End = Literal["embedding", "loss"]  # the stage that embeds tokens; the one with final norm, head and loss
Precision = Literal["model", "master"]
# How a parameter scales with the model (model/scaling.py). Matrices: from a vocabulary, of blocks, into the residual
# stream, of routers, to the vocabulary; the rest: into the stream, along the width, and shared by all heads.
Role = Literal["input", "hidden", "residual", "router", "output", "residual_bias", "vector", "shared"]
Group = Literal["tp", "word-embedding"]  # the last: the stages of one pipeline that hold a tied word embedding


@dataclass(frozen=True)
class Split:
    """Cuts `dim` into one contiguous slice per rank of the axis, in order of rank.

    With `replicated`, the axis may have more ranks than the dim has entries: neighbouring ranks then share an entry.
    They divide its next dim but for the last `replicated` entries, which each of them holds whole, with a partial
    gradient. So the queries of a group are divided, and its one key and value copied.
    """

    dim: int
    uneven: bool = False  # slice i of t is [i * n // t, (i + 1) * n // t); otherwise slices are equal
    replicated: int = 0


ROWS = Split(0, uneven=True)  # of a table of the vocabulary


@dataclass(frozen=True)
class ParameterRecord:
    """One logical parameter, or with `of_experts` the matrices of all experts of a layer: [experts, ...]."""

    name: str  # of the `torch.nn.Parameter` in the whole model, with the global layer index: blocks.11.mlp.up.weight
    shape: tuple[int, ...]
    init: Literal["normal", "zeros", "ones"]
    std: float  # the standard deviation of a `normal` start, the value of `ones`, which may be scaled
    decay: bool
    place: int | tuple[End, ...] = ()  # its layer, or the ends of the pipeline that hold a copy: both if it is tied
    split: Split | None = None  # over tp, of experts over etp; without it each rank there holds the whole
    partial_over: tuple[Group, ...] = ()  # the groups whose ranks each have a share of the gradient, to be summed
    of_experts: bool = False  # dim 0 is divided over ep
    precision: Precision = "model"  # master: the model computes with it in that of the masters
    heads: bool = False  # [groups, queries + 2, head size, inputs]: the queries, the key and the value of each group
    role: Role = "vector"
    stacked: int | None = None  # how many first dims count matrices; None: to an optimizer it is no matrix (a table)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def work(self) -> int:
        """What a Newton-Schulz polynomial costs in one of its matrices, in floating-point operations."""
        *rows, columns = self.shape[self.stacked :]
        parts = [prod(rows)]
        if self.heads:  # queries, keys and values, each for itself
            parts = [rows[0] * heads * rows[2] for heads in (rows[1] - 2, 1, 1)]
        sides = [sorted((part, columns)) for part in parts]
        return sum(4 * m * m * n + 2 * m**3 for m, n in sides)


@dataclass(frozen=True)
class ShardBox:
    """The box of the logical tensor that starts at `offsets`; in the rank's own tensor it starts at `local_offsets`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]
    replicas: int = 1  # consecutive ranks of the axis that hold it, the first at a multiple of `replicas`
    counted: bool = True  # on the first of them: in norms, and wherever else each element must be seen once

    @property
    def logical(self) -> tuple[slice, ...]:
        """The box as an index into the logical tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def local(self) -> tuple[slice, ...]:
        """The box as an index into the rank's own tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.local_offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a parameter: a tensor of `shape`, tiled by `boxes`."""

    shape: tuple[int, ...]
    boxes: tuple[ShardBox, ...]


def shard(record: ParameterRecord, size: int = 1, index: int = 0, ep: tuple[int, int] = (1, 0)) -> Shard:
    """What rank `index` of `size` along the record's axis (tp, of experts etp) holds; `ep`: size and index of the rank
    there, which matter for experts. That the sizes divide is a config rule."""
    if not record.of_experts:
        return shard_of(record.shape, record.split, size, index)
    ranks, place = ep
    assert record.shape[0] % ranks == 0, (record, ep)
    assert record.split is None or record.split.dim > 0, record
    experts = record.shape[0] // ranks
    held = shard_of((experts, *record.shape[1:]), record.split, size, index)
    boxes = [replace(box, offsets=(place * experts, *box.offsets[1:])) for box in held.boxes]
    return Shard(held.shape, tuple(boxes))


def shard_of(shape: tuple[int, ...], split: Split | None, size: int, index: int) -> Shard:
    """What rank `index` of `size` holds of anything of logical `shape`, cut by `split`."""
    assert 0 <= index < size, (index, size)
    zeros = (0,) * len(shape)
    if split is None:
        return Shard(shape, (ShardBox(zeros, shape, zeros, replicas=size, counted=index == 0),))
    dim, entries = split.dim, shape[split.dim]
    if size <= entries:
        assert split.uneven or entries % size == 0, (shape, split, size)
        start, stop = index * entries // size, (index + 1) * entries // size
        held = _with(shape, dim, stop - start)
        return Shard(held, (ShardBox(_with(zeros, dim, start), held, zeros),))
    sharers, divided = size // entries, shape[dim + 1] - split.replicated
    assert split.replicated > 0, (shape, split, size)
    assert size % entries == divided % sharers == 0, (shape, split, size)
    (entry, turn), share = divmod(index, sharers), divided // sharers
    own = ShardBox(_with(zeros, dim, entry, turn * share), _with(shape, dim, 1, share), zeros)
    shared = ShardBox(
        _with(zeros, dim, entry, divided),
        _with(shape, dim, 1, split.replicated),
        _with(zeros, dim + 1, share),
        replicas=sharers,
        counted=turn == 0,
    )
    return Shard(_with(shape, dim, 1, share + split.replicated), (own, shared))


def _with(numbers: tuple[int, ...], dim: int, *others: int) -> tuple[int, ...]:
    """`numbers` with `others` in place of those from `dim` on."""
    return (*numbers[:dim], *others, *numbers[dim + len(others) :])


def is_replicated(record: ParameterRecord, box: ShardBox) -> bool:
    """Whether several ranks hold this box of a parameter that is split: the `Split.replicated` entries."""
    return record.split is not None and box.replicas > 1


def is_held(record: ParameterRecord, stage: StageLayers) -> bool:
    """Whether the stage holds the parameter: by its layers, or as one of the ends of the pipeline."""
    place = record.place
    return place in stage.layers if isinstance(place, int) else any(getattr(stage, end) for end in place)


def is_counted(record: ParameterRecord, box: ShardBox, *, embedding: bool) -> bool:
    """Whether a rank counts the box that it holds: on the first of those that hold it alike, of a tied embedding on a
    stage that embeds (`embedding`)."""
    return box.counted and (embedding or record.place != ("embedding", "loss"))

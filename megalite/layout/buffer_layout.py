"""Which parameter lies where, in which bucket, and which of it each rank updates: plain records, no torch.

A buffer holds all parameters of one precision and one kind (dense or expert), in reverse order of registration, so that
backward completes it from its start to its end. It is cut into buckets, whose gradients travel together. Each of the
ranks that share a bucket's optimizer state owns an equal, aligned slice of it; slices cross the borders of parameters.
The layout is a function of sizes alone, the same on all ranks that exchange a bucket.
Facts: Megatron-LM's distributed optimizer (param_layout.py); Rajbhandari et al. 2019 (arXiv 1910.02054).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import groupby
from math import prod
from typing import Literal

from megalite.layout.parameters import ParameterRecord, Shard, ShardBox, shard

ALIGNMENT = 64  # elements: 256 bytes of fp32, so that parameters and slices start on full vectors and cache lines
Kind = Literal["dense", "expert"]
Ownership = Literal["even", "whole"]


@dataclass(frozen=True)
class BufferName:
    """What the parameters of one buffer have in common."""

    precision: Literal["model", "master"]
    kind: Kind


@dataclass(frozen=True)
class BufferSlot:
    """Elements [start, stop) of a buffer: what this rank holds of one parameter."""

    record: ParameterRecord
    shard: Shard
    start: int

    @property
    def stop(self) -> int:
        return self.start + prod(self.shard.shape)


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of a buffer, whose optimizer state `shards` ranks share."""

    buffer: BufferName
    start: int
    stop: int
    shards: int
    slots: tuple[BufferSlot, ...]

    @property
    def slice_size(self) -> int:
        return (self.stop - self.start) // self.shards

    def slice_of(self, index: int) -> range:
        """What rank `index` of the sharing ranks owns, in the buffer."""
        start = self.start + index * self.slice_size
        return range(start, start + self.slice_size)


@dataclass(frozen=True)
class OwnedRange:
    """What a rank owns of one parameter in bucket `bucket`, counted over all buffers.

    The same elements `in_buffer`, in the rank's slice of this bucket, and in the flat tensor that it holds of the
    parameter.
    """

    slot: BufferSlot
    bucket: int
    in_buffer: range
    in_slice: range
    in_parameter: range

    def boxes(self) -> Iterator[tuple[ShardBox, range, int]]:
        """Each box of the parameter of which it is a part: the box, which of its elements, and where in the slice."""
        shift = self.in_slice.start - self.in_parameter.start
        for box in self.slot.shard.boxes:
            flat = box.flat(self.slot.shard.shape)
            start, stop = max(flat.start, self.in_parameter.start), min(flat.stop, self.in_parameter.stop)
            if start < stop:
                yield box, range(start - flat.start, stop - flat.start), start + shift


@dataclass(frozen=True)
class SliceRange:
    """Elements [start, stop) of a rank's slice of bucket `bucket`."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True)
class BufferLayout:
    """All buckets of all buffers, in the order in which backward completes them."""

    buckets: tuple[Bucket, ...]

    @property
    def slots(self) -> list[BufferSlot]:
        return [slot for bucket in self.buckets for slot in bucket.slots]

    @property
    def sizes(self) -> dict[BufferName, int]:
        """Elements of each buffer."""
        sizes: dict[BufferName, int] = {}
        for bucket in self.buckets:
            sizes[bucket.buffer] = max(bucket.stop, sizes.get(bucket.buffer, 0))
        return sizes

    def owned(self, dense: int = 0, expert: int = 0) -> tuple[OwnedRange, ...]:
        """What the rank at position `dense` of the ranks that share dense state, `expert` of those of experts, owns."""
        index = {"dense": dense, "expert": expert}
        found = []
        for number, bucket in enumerate(self.buckets):
            own = bucket.slice_of(index[bucket.buffer.kind])
            for slot in bucket.slots:
                start, stop = max(own.start, slot.start), min(own.stop, slot.stop)
                if start < stop:
                    in_slice = range(start - own.start, stop - own.start)
                    in_parameter = range(start - slot.start, stop - slot.start)
                    found.append(OwnedRange(slot, number, range(start, stop), in_slice, in_parameter))
        return tuple(found)


def buffer_layout(
    records: Sequence[ParameterRecord],
    *,
    tp: tuple[int, int] = (1, 0),
    etp: tuple[int, int] = (1, 0),
    ep: tuple[int, int] = (1, 0),
    dense_shards: int = 1,
    expert_shards: int = 1,
    bucket_size: int | None = None,
    ownership: Ownership = "even",
) -> BufferLayout:
    """The layout of one rank's parameters; `tp`, `etp` and `ep` are (size, index) of the rank on these axes.

    A bucket ends before a block that would take it over `bucket_size` elements (default: `default_bucket_size`), so
    that a block's parameters arrive together, and inside a larger block after a parameter that reaches the size, unless
    less than that is left.
    Tables of the vocabulary have buckets of their own: a tied one is cut alike by both ends of a pipeline, an uneven
    one leaves all else alike on the ranks of tp, which add up slices of what they replicate. With `ownership` "whole"
    each parameter but these tables has one owner, for optimizers that need matrices: every slice has room for the
    largest, and buckets grow until at most a fifth of them is padding.
    """
    shards: dict[Kind, int] = {"dense": dense_shards, "expert": expert_shards}
    places: dict[Kind, tuple[int, int]] = {"dense": tp, "expert": etp}
    by_buffer: dict[BufferName, list[Held]] = {}
    order: dict[str, int] = {}  # in which backward completes the parameters
    for record in reversed(records):
        name = BufferName(record.precision, "expert" if record.of_experts else "dense")
        by_buffer.setdefault(name, []).append((record, shard(record, *places[name.kind], ep)))
        order[record.name] = len(order)
    buckets: list[Bucket] = []
    for name, held in by_buffer.items():
        sharing, start = shards[name.kind], 0
        target = default_bucket_size(sharing) if bucket_size is None else bucket_size
        owners = sharing if ownership == "whole" else 1
        for content in _cut(held, target, owners):
            shares = [content] if _is_table(content[0][0]) else _shares(content, owners)
            buckets.append(_bucket(name, start, sharing, shares))
            start = buckets[-1].stop
    buckets.sort(key=lambda bucket: max(order[slot.record.name] for slot in bucket.slots))
    return BufferLayout(tuple(buckets))


def default_bucket_size(shards: int) -> int:
    """Elements: large enough that each rank's slice is worth a message (Megatron-LM's rule)."""
    return max(40_000_000, 1_000_000 * shards)


def slice_ranges(owned: Iterable[OwnedRange], wanted: Callable[[ParameterRecord, ShardBox], bool]) -> list[SliceRange]:
    """Where in a rank's slices the wanted boxes of parameters lie: those that touch are one range."""
    found: list[SliceRange] = []
    for each in owned:
        for box, elements, start in each.boxes():
            if wanted(each.slot.record, box):
                touches = found and (found[-1].bucket, found[-1].stop) == (each.bucket, start)
                first = found.pop().start if touches else start
                found.append(SliceRange(each.bucket, first, start + len(elements)))
    return found


Held = tuple[ParameterRecord, Shard]


def _cut(held: Sequence[Held], target: int, owners: int) -> Iterator[list[Held]]:
    """The contents of the buckets of one buffer, in order. With several `owners` of wholes a bucket goes on until they
    can have like shares of it."""
    content: list[Held] = []
    size = 0
    for (table, _), members in groupby(held, key=lambda each: (_is_table(each[0]), each[0].place)):
        block = list(members)
        length = _size(block)
        if content and (table or (size + length > target and _is_level(content, owners))):
            yield content
            content, size = [], 0
        for each in block:
            content.append(each)
            size += _size([each])
            length -= _size([each])  # what is left of the block: less than a bucket joins the last one
            if table or (size >= target <= length and _is_level(content, owners)):
                yield content
                content, size = [], 0
    if content:
        yield content


def _is_table(record: ParameterRecord) -> bool:
    """Whether it is a table of the vocabulary."""
    tied = isinstance(record.place, tuple) and len(record.place) > 1
    return tied or (record.split is not None and record.split.uneven)


def _bucket(name: BufferName, start: int, shards: int, shares: Sequence[Sequence[Held]]) -> Bucket:
    """The shares one after the other, in rooms of equal size; each parameter starts aligned."""
    room, slots = max(map(_size, shares)), []
    for number, share in enumerate(shares):
        cursor = start + number * room
        for record, held in share:
            slots.append(BufferSlot(record, held, cursor))
            cursor += _padded(prod(held.shape), ALIGNMENT)
    return Bucket(name, start, start + _padded(len(shares) * room, ALIGNMENT * shards), shards, tuple(slots))


def _shares(content: Sequence[Held], owners: int) -> list[list[Held]]:
    """Each parameter, the largest first, goes to the owner that has least; inside a share they keep their order."""
    loads = [(0, owner) for owner in range(owners)]  # a heap
    members: list[list[int]] = [[] for _ in loads]
    for at in sorted(range(len(content)), key=lambda at: -_size([content[at]])):
        load, owner = loads[0]
        members[owner].append(at)
        heapreplace(loads, (load + _size([content[at]]), owner))
    return [[content[at] for at in sorted(share)] for share in members]


def _is_level(content: Sequence[Held], owners: int) -> bool:
    """Whether at most a fifth is padding where each parameter has one of so many owners."""
    room = owners * max(map(_size, _shares(content, owners)))
    return 5 * _size(content) >= 4 * room


def _size(content: Iterable[Held]) -> int:
    return sum(_padded(prod(held.shape), ALIGNMENT) for _, held in content)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

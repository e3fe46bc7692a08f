"""Which parameter lies where, in which bucket, and which part of it each rank updates: plain records, no torch.

A buffer holds all parameters of one precision and one kind (dense or expert), in reverse order of registration, so that
backward completes it from its start to its end. It is cut into buckets, whose gradients travel together. A bucket's
length is a multiple of the ranks that share its optimizer state, so that each owns an equal, aligned slice of it;
slices cross the borders of parameters. The layout is a function of sizes alone, the same on all ranks that exchange a
bucket.
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
    """A part of one parameter that a rank owns, seen from four places. Bucket `bucket` counts over all buffers.

    `in_shard` is in all that the rank owns of the buffer, its slices of all buckets one after the other; `in_slice` is
    in its slice of this bucket; `in_parameter` is in the flat tensor that the rank holds of the parameter.
    """

    slot: BufferSlot
    bucket: int
    in_buffer: range
    in_bucket: range
    in_shard: range
    in_slice: range
    in_parameter: range


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
        return tuple(
            owned
            for number, bucket in enumerate(self.buckets)
            for owned in _owned_of_bucket(number, bucket, index[bucket.buffer.kind])
        )


def buffer_layout(
    records: Sequence[ParameterRecord],
    *,
    tp: tuple[int, int] = (1, 0),
    etp: tuple[int, int] = (1, 0),
    dense_shards: int = 1,
    expert_shards: int = 1,
    bucket_size: int | None = None,
    ownership: Ownership = "even",
) -> BufferLayout:
    """The layout of one rank's parameters; `tp` and `etp` are (size, index) of the rank on these axes.

    A bucket ends before a block that would take it over `bucket_size` elements (default: `default_bucket_size`), so
    that a block's parameters arrive together; a larger block is cut between parameters. Tables of the vocabulary have
    buckets of their own: a tied one is cut alike by both ends of a pipeline, an uneven one leaves all else alike on the
    ranks of tp, which add up slices of what they replicate. With `ownership` "whole" each parameter but these tables
    has one owner, for optimizers that need matrices: every slice has room for the largest, and buckets grow until at
    most a fifth of them is padding.
    """
    shards: dict[Kind, int] = {"dense": dense_shards, "expert": expert_shards}
    places: dict[Kind, tuple[int, int]] = {"dense": tp, "expert": etp}
    by_buffer: dict[BufferName, list[Held]] = {}
    order: dict[str, int] = {}  # in which backward completes the parameters
    for record in reversed(records):
        name = BufferName(record.precision, "dense" if record.expert is None else "expert")
        by_buffer.setdefault(name, []).append((record, shard(record, *places[name.kind])))
        order[record.name] = len(order)
    buckets: list[Bucket] = []
    for name, held in by_buffer.items():
        sharing, start = shards[name.kind], 0
        target = default_bucket_size(sharing) if bucket_size is None else bucket_size
        for content in _cut(held, target, sharing if ownership == "whole" else 1):
            whole = ownership == "whole" and not _alone(content[0][0])
            buckets.append((_whole_bucket if whole else _even_bucket)(name, start, sharing, content))
            start = buckets[-1].stop
    buckets.sort(key=lambda bucket: max(order[slot.record.name] for slot in bucket.slots))
    return BufferLayout(tuple(buckets))


def default_bucket_size(shards: int) -> int:
    """Elements: large enough that each rank's slice is worth a message (Megatron-LM's rule)."""
    return max(40_000_000, 1_000_000 * shards)


def slice_ranges(owned: Iterable[OwnedRange], wanted: Callable[[ParameterRecord], bool]) -> list[SliceRange]:
    """Where in a rank's slices the wanted parameters lie: neighbours are one range, with the padding between them."""
    found: list[SliceRange] = []
    neighbour: int | None = None  # bucket of the range before, where that is wanted too
    for each in owned:
        if not wanted(each.slot.record):
            neighbour = None
            continue
        start = found.pop().start if neighbour == each.bucket else each.in_slice.start
        found.append(SliceRange(each.bucket, start, each.in_slice.stop))
        neighbour = each.bucket
    return found


def box_ranges(owned: Iterable[OwnedRange], wanted: Callable[[BufferSlot, ShardBox], bool]) -> list[SliceRange]:
    """Where in a rank's slices the wanted boxes of parameters lie."""
    found = []
    for each in owned:
        for box in each.slot.shard.boxes:
            flat = box.flat(each.slot.shard.shape)
            start, stop = max(flat.start, each.in_parameter.start), min(flat.stop, each.in_parameter.stop)
            if start < stop and wanted(each.slot, box):
                shift = each.in_slice.start - each.in_parameter.start
                found.append(SliceRange(each.bucket, start + shift, stop + shift))
    return found


Held = tuple[ParameterRecord, Shard]


def _cut(held: Sequence[Held], target: int, owners: int) -> Iterator[list[Held]]:
    """The contents of the buckets of one buffer, in order. With several `owners` of wholes a bucket goes on until they
    can have like shares of it."""
    content: list[Held] = []
    for alone, block in _blocks(held):
        for piece in _parts(block, target):
            over = _size(content) + _size(piece) > target and _is_level(content, owners)
            if content and (alone or over):
                yield content
                content = []
            content = [*content, *piece]
        if alone:
            yield content
            content = []
    if content:
        yield content


def _blocks(held: Iterable[Held]) -> Iterator[tuple[bool, list[Held]]]:
    """Neighbours at one place of the model, or a table of the vocabulary, which stands alone."""
    for (alone, _), members in groupby(held, key=lambda each: (_alone(each[0]), each[0].place)):
        if alone:
            yield from ((alone, [each]) for each in members)
        else:
            yield alone, list(members)


def _parts(block: Sequence[Held], target: int) -> list[list[Held]]:
    """A block that is larger is cut between parameters into parts that reach the target; its rest joins the last."""
    parts: list[list[Held]] = [[]]
    for each in block:
        if _size(parts[-1]) >= target:
            parts.append([])
        parts[-1].append(each)
    if len(parts) > 1 and _size(parts[-1]) < target:
        rest = parts.pop()
        parts[-1] += rest
    return parts


def _alone(record: ParameterRecord) -> bool:
    tied = isinstance(record.place, tuple) and len(record.place) > 1
    return tied or (record.split is not None and record.split.uneven)


def _even_bucket(name: BufferName, start: int, shards: int, content: Sequence[Held]) -> Bucket:
    slots, cursor = _placed(content, start)
    return Bucket(name, start, start + _padded(cursor - start, ALIGNMENT * shards), shards, tuple(slots))


def _whole_bucket(name: BufferName, start: int, shards: int, content: Sequence[Held]) -> Bucket:
    shares = _shares(content, shards)
    size = max(map(_size, shares))
    slots = [slot for owner, share in enumerate(shares) for slot in _placed(share, start + owner * size)[0]]
    return Bucket(name, start, start + shards * size, shards, tuple(slots))


def _shares(content: Sequence[Held], owners: int) -> list[list[Held]]:
    """Each parameter, the largest first, goes to the owner that has least; inside a share they keep their order."""
    sizes = [_size([each]) for each in content]
    loads = [(0, owner) for owner in range(owners)]  # a heap
    members: list[list[int]] = [[] for _ in loads]
    for at in sorted(range(len(content)), key=lambda at: -sizes[at]):
        load, owner = loads[0]
        members[owner].append(at)
        heapreplace(loads, (load + sizes[at], owner))
    return [[content[at] for at in sorted(share)] for share in members]


def _is_level(content: Sequence[Held], owners: int) -> bool:
    """Whether at most a fifth is padding where each parameter has one of so many owners."""
    room = owners * max(map(_size, _shares(content, owners)))
    return 5 * _size(content) >= 4 * room


def _placed(content: Iterable[Held], start: int) -> tuple[list[BufferSlot], int]:
    """Slots one after the other from `start`, each aligned, and where the next one would start."""
    slots = []
    for record, part in content:
        slots.append(BufferSlot(record, part, start))
        start += _padded(prod(part.shape), ALIGNMENT)
    return slots, start


def _size(content: Iterable[Held]) -> int:
    return sum(_padded(prod(part.shape), ALIGNMENT) for _, part in content)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _owned_of_bucket(number: int, bucket: Bucket, index: int) -> Iterator[OwnedRange]:
    own = bucket.slice_of(index)
    for slot in bucket.slots:
        start, stop = max(own.start, slot.start), min(own.stop, slot.stop)
        if start < stop:
            in_slice = range(start - own.start, stop - own.start)
            before = bucket.start // bucket.shards  # all that the rank owns of the buckets before
            yield OwnedRange(
                slot,
                number,
                in_buffer=range(start, stop),
                in_bucket=range(start - bucket.start, stop - bucket.start),
                in_shard=range(before + in_slice.start, before + in_slice.stop),
                in_slice=in_slice,
                in_parameter=range(start - slot.start, stop - slot.start),
            )

"""Which parameter lies where, in which bucket, and which of it each rank updates: plain records, no torch.

A bucket holds parameters of one precision, one kind (dense or expert) and one ownership, in the order in which backward
completes them; their gradients travel together. Each of the ranks that share a bucket's optimizer state owns an equal,
aligned slice of it. With ownership "even" slices cross the borders of parameters; with "whole", for optimizers that
need matrices, no matrix has two owners. The layout is a function of sizes alone, the same on all ranks that exchange a
bucket. Facts: Megatron-LM's distributed optimizer (param_layout.py); Rajbhandari et al. 2019 (arXiv 1910.02054).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Literal, NamedTuple

from megalite.layout.parameters import ROWS, ParameterRecord, Precision, Shard, ShardBox, shard

ALIGNMENT = 64  # elements: 256 bytes of fp32, so that parameters and slices start on full vectors and cache lines
Kind = Literal["dense", "expert"]
Ownership = Literal["even", "whole"]


@dataclass(frozen=True)
class BufferSlot:
    """Elements [start, stop) of a bucket: what this rank holds of one parameter."""

    record: ParameterRecord
    shard: Shard
    start: int = 0

    @property
    def stop(self) -> int:
        return self.start + prod(self.shard.shape)

    @cached_property
    def padded(self) -> int:
        """The size that other slots keep free."""
        return _padded(prod(self.shard.shape), ALIGNMENT)

    @cached_property
    def unit(self) -> int:
        """The elements that `whole` gives to one owner: each matrix of a stack, or all of them if they are unaligned.
        `attention.qkv`, whose q, k and v alternate in memory, counts as one matrix."""
        matrix = prod(self.shard.shape[self.record.stacked :])
        return self.padded if matrix % ALIGNMENT else matrix


@dataclass(frozen=True)
class Bucket:
    """`size` elements, whose optimizer state `shards` ranks share: rank i of them owns the i-th slice."""

    precision: Precision
    kind: Kind
    whole: bool  # its parameters are matrices with one owner each
    size: int
    shards: int
    slots: tuple[BufferSlot, ...]

    @property
    def slice_size(self) -> int:
        return self.size // self.shards


Content = tuple[int, list[BufferSlot]]  # of a bucket: its size, and what lies where


@dataclass(frozen=True)
class OwnedRange:
    """A rank's part of one box of a parameter: its place in the box, in the flat tensor that the rank holds of the
    parameter, and in the rank's slice of bucket number `bucket`."""

    slot: BufferSlot
    bucket: int
    box: ShardBox
    in_box: range
    in_parameter: range
    in_slice: range


class SliceRange(NamedTuple):
    """Elements [start, stop) of a rank's slice of bucket `bucket`."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True)
class BufferLayout:
    """All buckets, in the order in which backward completes them."""

    buckets: tuple[Bucket, ...]

    def owned(self, dense: int = 0, expert: int = 0) -> tuple[OwnedRange, ...]:
        """The ranges of the rank at position `dense` of those that share dense state, `expert` of those of experts."""
        found = []
        for number, bucket in enumerate(self.buckets):
            first = bucket.slice_size * (dense if bucket.kind == "dense" else expert)
            for slot in bucket.slots:
                # In memory the boxes follow one another.
                ends = accumulate((prod(box.sizes) for box in slot.shard.boxes), initial=slot.start)
                for box, (start, stop) in zip(slot.shard.boxes, pairwise(ends), strict=True):
                    both = range(max(first, start), min(first + bucket.slice_size, stop))
                    if both:
                        parts = (range(both.start - at, both.stop - at) for at in (start, slot.start, first))
                        found.append(OwnedRange(slot, number, box, *parts))
        return tuple(found)


def slice_ranges(owned: Iterable[OwnedRange], wanted: Callable[[ParameterRecord, ShardBox], bool]) -> list[SliceRange]:
    """Where in a rank's slices the wanted boxes of parameters lie: those that touch are one range."""
    found: list[SliceRange] = []
    for each in (each for each in owned if wanted(each.slot.record, each.box)):
        start, stop = each.in_slice.start, each.in_slice.stop
        if found and (found[-1].bucket, found[-1].stop) == (each.bucket, start):
            start = found.pop().start
        found.append(SliceRange(each.bucket, start, stop))
    return found


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
    """The layout of one rank's parameters; `tp`, `etp` and `ep` are (size, index) of the rank on these axes. The
    default size of a bucket is Megatron-LM's, large enough that each rank's slice is worth a message."""
    alike, order = defaultdict[tuple[Precision, Kind, bool], list[BufferSlot]](list), dict[str, int]()
    for number, record in enumerate(reversed(records)):  # in the order in which backward completes them
        kind: Kind = "expert" if record.of_experts else "dense"
        slot = BufferSlot(record, shard(record, *(etp if record.of_experts else tp), ep))
        alike[record.precision, kind, ownership == "whole" and record.stacked is not None].append(slot)
        order[record.name] = number
    buckets: list[Bucket] = []
    for (precision, kind, whole), slots in alike.items():
        shards = dense_shards if kind == "dense" else expert_shards
        target = max(40_000_000, 1_000_000 * shards) if bucket_size is None else bucket_size
        for size, placed in (_cut_wholes if whole else _cut_evenly)(slots, target, shards):
            buckets.append(Bucket(precision, kind, whole, size, shards, tuple(placed)))
    buckets.sort(key=lambda bucket: max(order[slot.record.name] for slot in bucket.slots))
    work: dict[Kind, list[int]] = {"dense": [0] * dense_shards, "expert": [0] * expert_shards}
    return BufferLayout(tuple(_balanced(one, work[one.kind]) if one.whole else one for one in buckets))


def _cut_evenly(slots: Sequence[BufferSlot], target: int, shards: int) -> Iterator[Content]:
    """One parameter after the other. A bucket ends before a block that would take it over `target` elements, so that a
    block's parameters arrive together, and inside a larger block after a parameter that reaches them, unless less than
    that is left. Tables of the vocabulary have buckets of their own: a tied table is cut alike by both ends of a
    pipeline, and an uneven one leaves all else alike on the ranks of tp, which add up slices of what they replicate."""
    contents: list[list[BufferSlot]] = [[]]
    for (table, _), members in groupby(slots, key=lambda slot: (slot.record.split == ROWS, slot.record.place)):
        block = list(members)
        if table or _size(contents[-1]) + _size(block) > target:
            contents.append([])
        for at, slot in enumerate(block, 1):
            contents[-1].append(slot)
            if table or _size(contents[-1]) >= target <= _size(block[at:]):
                contents.append([])
    for content in filter(None, contents):
        starts = accumulate((slot.padded for slot in content[:-1]), initial=0)
        placed = [replace(slot, start=start) for slot, start in zip(content, starts, strict=True)]
        yield _padded(_size(content), ALIGNMENT * shards), placed


def _cut_wholes(slots: Sequence[BufferSlot], target: int, shards: int) -> list[Content]:
    """Buckets of about `target` elements, to which blocks are dealt evenly, and fewer where that leaves more than a
    fifth of a bucket as padding."""
    blocks = [list(members) for _, members in groupby(slots, key=lambda slot: slot.record.place)]
    total, buckets = _size(slots), list[Content]()
    for number in range(min(len(blocks), -(-total // target)), 0, -1):
        contents, before = defaultdict[int, list[BufferSlot]](list), 0
        for block in blocks:
            contents[(2 * before + _size(block)) * number // (2 * total)] += block  # by the block's middle
            before += _size(block)
        buckets = [_pack(content, shards) for content in contents.values()]
        if all(4 * size <= 5 * _size(placed) for size, placed in buckets):
            break
    return buckets


def _pack(content: Sequence[BufferSlot], shards: int) -> Content:
    """The bucket with the smallest slices that cut no unit: one slot after the other, those of large units first."""
    slots = sorted(content, key=lambda slot: (slot.unit, slot.padded), reverse=True)
    least = max(-(-_size(slots) // shards), slots[0].unit)
    units = {ALIGNMENT, *(slot.unit for slot in slots if slot.unit < slot.padded)}
    sizes = {_padded(least + least * more // 32, unit) for more in range(97) for unit in units}
    sizes.add(_padded(least * shards, ALIGNMENT))  # a slice that holds everything
    tried = ((size, _fit(slots, size, size * shards)) for size in sorted(sizes))
    size, placed = next((size, placed) for size, placed in tried if placed)
    return size * shards, sorted(placed, key=lambda slot: slot.start)


def _balanced(bucket: Bucket, work: list[int]) -> Bucket:
    """The bucket with each slot, those of large units first, where the owners have the least to do of all buckets so
    far; as it is where they do not all fit so. `work` of the owners becomes what they have then."""
    slots = sorted(bucket.slots, key=lambda slot: (slot.unit, slot.padded), reverse=True)
    placed = _fit(slots, bucket.slice_size, bucket.size, work.copy()) or bucket.slots
    for slot in placed:
        _add_work(slot, bucket.slice_size, work)
    return replace(bucket, slots=tuple(sorted(placed, key=lambda slot: slot.start)))


def _add_work(slot: BufferSlot, slice_size: int, work: list[int]) -> None:
    for start in range(slot.start, slot.start + slot.padded, slot.unit):
        work[start // slice_size] += slot.record.work


def _fit(slots: Iterable[BufferSlot], slice_size: int, end: int, work: list[int] | None = None) -> list[BufferSlot]:
    """The slots in [0, end), each in the first gap that takes it uncut, or with `work` of the owners where the one who
    has the most has least; none where they do not all fit."""
    gaps, placed = [(0, end)], list[BufferSlot]()
    for slot in slots:
        places: Iterable[tuple[int, int]] = (
            (at, start)
            for at, (low, high) in enumerate(gaps)
            for first in (low, *(range(_padded(low + 1, slice_size), high, slice_size) if work else ()))
            for start in _uncut(slot, first, high, slice_size)
        )
        if work:
            places = sorted(
                places,
                key=lambda place: max(work[place[1] // slice_size : (place[1] + slot.padded - 1) // slice_size + 1]),
            )
        at, start = next(iter(places), (-1, -1))
        if at < 0:
            return []
        (low, high), stop = gaps[at], start + slot.padded
        gaps[at : at + 1] = [gap for gap in ((low, start), (stop, high)) if gap[0] < gap[1]]
        placed.append(replace(slot, start=start))
        if work:
            _add_work(placed[-1], slice_size, work)
    return placed


def _uncut(slot: BufferSlot, low: int, high: int, slice_size: int) -> Iterator[int]:
    """Places of the slot in the gap [low, high) where borders of slices fall between its units, if on it at all."""
    border = (low // slice_size + 1) * slice_size
    for start in (low, low + (border - low) % slot.unit, border, border + slice_size % slot.unit):
        stop, first = start + slot.padded, (start // slice_size + 1) * slice_size
        if stop <= high and all((at - start) % slot.unit == 0 for at in range(first, stop, slice_size)):
            yield start


def _size(slots: Iterable[BufferSlot]) -> int:
    return sum(slot.padded for slot in slots)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

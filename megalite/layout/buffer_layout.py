"""Which parameter lies where, in which bucket, and which of it each rank updates: plain records, no torch.

A buffer holds all parameters of one precision, one kind (dense or expert) and one ownership, in the order in which
backward completes them. It is cut into buckets, whose gradients travel together. Each of the ranks that share a
bucket's optimizer state owns an equal, aligned slice of it. With ownership "even" slices cross the borders of
parameters; with "whole" no matrix has two owners. The layout is a function of sizes alone, the same on all ranks that
exchange a bucket. Facts: Megatron-LM's distributed optimizer (param_layout.py); Rajbhandari et al. 2019
(arXiv 1910.02054).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from math import prod
from typing import Literal

from megalite.layout.parameters import ParameterRecord, Shard, ShardBox, shard

ALIGNMENT = 64  # elements: 256 bytes of fp32, so that parameters and slices start on full vectors and cache lines
Kind = Literal["dense", "expert"]
Ownership = Literal["even", "whole"]


@dataclass(frozen=True)
class BufferName:
    """What the parameters of one buffer have in common. `whole`: they are matrices with one owner each."""

    precision: Literal["model", "master"]
    kind: Kind
    whole: bool = False


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
    less than that is left. Tables of the vocabulary have buckets of their own: a tied one is cut alike by both ends of
    a pipeline, an uneven one leaves all else alike on the ranks of tp, which add up slices of what they replicate.

    With `ownership` "whole", for optimizers that need matrices, a matrix lies in one slice: each of those that a
    parameter stacks (gate, up, an expert's), while `attention.qkv`, whose q, k and v alternate in memory, counts as
    one. Buckets of matrices are of like size, and as many as leave at most a fifth of each as padding.
    """
    shards: dict[Kind, int] = {"dense": dense_shards, "expert": expert_shards}
    places: dict[Kind, tuple[int, int]] = {"dense": tp, "expert": etp}
    by_buffer: dict[BufferName, list[Held]] = {}
    order: dict[str, int] = {}  # in which backward completes the parameters
    for record in reversed(records):
        whole = ownership == "whole" and record.stacked is not None
        name = BufferName(record.precision, "expert" if record.of_experts else "dense", whole)
        by_buffer.setdefault(name, []).append((record, shard(record, *places[name.kind], ep)))
        order[record.name] = len(order)
    buckets: list[Bucket] = []
    for name, held in by_buffer.items():
        sharing, start = shards[name.kind], 0
        target = default_bucket_size(sharing) if bucket_size is None else bucket_size
        for content, starts, size in (_cut_wholes if name.whole else _cut)(held, target, sharing):
            slots = [BufferSlot(*each, start + at) for each, at in zip(content, starts, strict=True)]
            slots.sort(key=lambda slot: slot.start)
            buckets.append(Bucket(name, start, start + size, sharing, tuple(slots)))
            start += size
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
Placed = tuple[Sequence[Held], Sequence[int], int]  # a bucket's content, where each of it starts, the bucket's size


def _cut(held: Sequence[Held], target: int, shards: int) -> Iterator[Placed]:
    """Buckets in which one parameter follows the other."""
    content: list[Held] = []
    size = 0
    for (table, _), members in groupby(held, key=lambda each: (_is_table(each[0]), each[0].place)):
        block = list(members)
        length = _size(block)
        if content and (table or size + length > target):
            yield _in_a_row(content, shards)
            content, size = [], 0
        for each in block:
            content.append(each)
            size += _size([each])
            length -= _size([each])  # what is left of the block: less than a bucket joins the last one
            if table or size >= target <= length:
                yield _in_a_row(content, shards)
                content, size = [], 0
    if content:
        yield _in_a_row(content, shards)


def _in_a_row(content: Sequence[Held], shards: int) -> Placed:
    starts = [_size(content[:at]) for at in range(len(content))]
    return content, starts, _padded(_size(content), ALIGNMENT * shards)


def _is_table(record: ParameterRecord) -> bool:
    """Whether it is a table of the vocabulary."""
    tied = isinstance(record.place, tuple) and len(record.place) > 1
    return tied or (record.split is not None and record.split.uneven)


def _cut_wholes(held: Sequence[Held], target: int, shards: int) -> list[Placed]:
    """Buckets of matrices with one owner each: blocks are dealt to buckets of like size, and where that leaves too much
    padding, to fewer."""
    blocks = [list(members) for _, members in groupby(held, key=lambda each: each[0].place)]
    total = _size(held)
    for number in range(min(len(blocks), -(-total // target)), 0, -1):
        contents: list[list[Held]] = [[] for _ in range(number)]
        before = 0
        for block in blocks:
            contents[(2 * before + _size(block)) * number // (2 * total)] += block  # by the block's middle
            before += _size(block)
        placed = [_place_wholes(content, shards, tight=number > 1) for content in contents if content]
        if None not in placed:
            break
    return [each for each in placed if each is not None]


def _place_wholes(content: Sequence[Held], shards: int, *, tight: bool) -> Placed | None:
    """The smallest slices found that hold the matrices of `content` whole, the largest matrices first; None where that
    is to be `tight` and takes more than a fifth of padding."""
    stacks = sorted(((*_stack(each), at) for at, each in enumerate(content)), reverse=True)
    size, units = _size(content), {unit for unit, number, _ in stacks if number > 1}
    least = max(-(-size // shards), stacks[0][0])
    for step in count():
        smallest = _padded(least + least * step // 32, ALIGNMENT)
        if tight and 4 * smallest * shards > 5 * size:
            return None
        for room in sorted({smallest, *(_padded(smallest, unit) for unit in units)}):
            starts = _first_fit(stacks, room, room * shards)
            if starts is not None and not (tight and 4 * room * shards > 5 * size):
                return [content[at] for *_, at in stacks], starts, room * shards
    raise AssertionError("unreachable: a slice that holds everything is tried in the end")


def _stack(held: Held) -> tuple[int, int]:
    """The elements of one matrix of a parameter, and how many of them follow one another; what is not aligned is one
    piece."""
    of_rank, stacked = held[1], held[0].stacked
    unit, number = prod(of_rank.shape[stacked:]), prod(of_rank.shape[:stacked])
    return (unit, number) if unit % ALIGNMENT == 0 else (_size([held]), 1)


def _first_fit(stacks: Sequence[tuple[int, int, int]], room: int, end: int) -> list[int] | None:
    """Where stacks of (unit, number) start in [0, end) so that no multiple of `room` cuts a unit; None: too little."""
    gaps, starts = [(0, end)], []
    for unit, number, _ in stacks:
        size = unit * number
        found = next(
            ((at, start) for at, gap in enumerate(gaps) if (start := _start(*gap, unit, size, room)) >= 0), None
        )
        if found is None:
            return None
        (at, start), (low, high) = found, gaps[found[0]]
        gaps[at : at + 1] = [gap for gap in ((low, start), (start + size, high)) if gap[0] < gap[1]]
        starts.append(start)
    return starts


def _start(low: int, high: int, unit: int, size: int, room: int) -> int:
    """The first place of a stack in a gap at which multiples of `room` fall between units; -1: none."""
    border = (low // room + 1) * room
    tried = (low, low + (border - low) % unit, border, border + room % unit)
    return next((start for start in tried if start + size <= high and _is_uncut(start, unit, size, room)), -1)


def _is_uncut(start: int, unit: int, size: int, room: int) -> bool:
    """Whether multiples of `room` fall between units alone in the stack of `size` at `start`."""
    border = (start // room + 1) * room - start
    return border >= size or (border % unit == 0 and (border + room >= size or room % unit == 0))


def _size(content: Iterable[Held]) -> int:
    return sum(_padded(prod(held.shape), ALIGNMENT) for _, held in content)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

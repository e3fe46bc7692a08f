"""Which parameter lies where, in which bucket, and which of it each rank updates: plain records, no torch.

A bucket holds parameters of one precision, one kind (dense or expert) and one ownership, in the order in which backward
completes them; their gradients travel together. Each of the ranks that share a bucket's optimizer state owns an equal,
aligned slice of it. With ownership "even" slices cross the borders of parameters; with "whole" no matrix has two
owners. The layout is a function of sizes alone, the same on all ranks that exchange a bucket.
Facts: Megatron-LM's distributed optimizer (param_layout.py); Rajbhandari et al. 2019 (arXiv 1910.02054).
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
Held = tuple[ParameterRecord, Shard, int]  # with the padded size


@dataclass(frozen=True)
class BufferName:
    """The properties that the parameters of a bucket share. `whole`: they are matrices with one owner each."""

    precision: Literal["model", "master"]
    kind: Kind
    whole: bool = False


@dataclass(frozen=True)
class BufferSlot:
    """Elements [start, stop) of a bucket: what this rank holds of one parameter."""

    record: ParameterRecord
    shard: Shard
    start: int

    @property
    def stop(self) -> int:
        return self.start + prod(self.shard.shape)


@dataclass(frozen=True)
class Bucket:
    """`size` elements, whose optimizer state `shards` ranks share: rank i of them owns the i-th slice."""

    buffer: BufferName
    size: int
    shards: int
    slots: tuple[BufferSlot, ...]

    @property
    def slice_size(self) -> int:
        return self.size // self.shards


@dataclass(frozen=True)
class OwnedRange:
    """A rank's part of one parameter: its place in the rank's slice of bucket number `bucket`, and in the flat tensor
    that the rank holds of the parameter."""

    slot: BufferSlot
    bucket: int
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
    """All buckets, in the order in which backward completes them."""

    buckets: tuple[Bucket, ...]

    @property
    def slots(self) -> list[BufferSlot]:
        return [slot for bucket in self.buckets for slot in bucket.slots]

    def owned(self, dense: int = 0, expert: int = 0) -> tuple[OwnedRange, ...]:
        """The ranges of the rank at position `dense` of those that share dense state, `expert` of those of experts."""
        found = []
        for number, bucket in enumerate(self.buckets):
            first = bucket.slice_size * (dense if bucket.buffer.kind == "dense" else expert)
            for slot in bucket.slots:
                both = range(max(first, slot.start), min(first + bucket.slice_size, slot.stop))
                if both:
                    parts = (range(both.start - at, both.stop - at) for at in (first, slot.start))
                    found.append(OwnedRange(slot, number, *parts))
        return tuple(found)


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

    A bucket ends before a block that would take it over `bucket_size` elements (default: Megatron-LM's, large enough
    that each rank's slice is worth a message), so that a block's parameters arrive together, and inside a larger block
    after a parameter that reaches the size, unless less than that is left. Tables of the vocabulary have buckets of
    their own: a tied one is cut alike by both ends of a pipeline, an uneven one leaves all else alike on the ranks of
    tp, which add up slices of what they replicate.

    With `ownership` "whole", for optimizers that need matrices, a matrix lies in one slice: each of those that a
    parameter stacks (gate, up, an expert's), while `attention.qkv`, whose q, k and v alternate in memory, counts as
    one. Buckets of matrices are of like size, and as many as leave at most a fifth of each as padding.
    """
    by_buffer: dict[BufferName, list[Held]] = {}
    order: dict[str, int] = {}  # in which backward completes the parameters
    for record in reversed(records):
        of_rank = shard(record, *(etp if record.of_experts else tp), ep)
        whole = ownership == "whole" and record.stacked is not None
        name = BufferName(record.precision, "expert" if record.of_experts else "dense", whole)
        by_buffer.setdefault(name, []).append((record, of_rank, _padded(prod(of_rank.shape), ALIGNMENT)))
        order[record.name] = len(order)
    buckets: list[Bucket] = []
    for name, held in by_buffer.items():
        shards = dense_shards if name.kind == "dense" else expert_shards
        target = max(40_000_000, 1_000_000 * shards) if bucket_size is None else bucket_size
        cut = _cut_wholes if name.whole else _cut_evenly
        buckets += [Bucket(name, size, shards, slots) for slots, size in cut(held, target, shards)]
    buckets.sort(key=lambda bucket: max(order[slot.record.name] for slot in bucket.slots))
    return BufferLayout(tuple(buckets))


Placed = tuple[tuple[BufferSlot, ...], int]  # the slots of a bucket and its size


def _cut_evenly(held: Sequence[Held], target: int, shards: int) -> Iterator[Placed]:
    """The buckets with even ownership, in order: one parameter after the other."""
    contents: list[list[Held]] = [[]]
    for (table, _), members in groupby(held, key=lambda each: (_is_table(each[0]), each[0].place)):
        block = list(members)
        if table or _size(contents[-1]) + _size(block) > target:
            contents.append([])
        for at, each in enumerate(block):
            contents[-1].append(each)
            # What is left of the block joins this bucket if it is less than a bucket.
            if table or _size(contents[-1]) >= target <= _size(block[at + 1 :]):
                contents.append([])
    for content in filter(None, contents):
        slots = [BufferSlot(*each[:2], _size(content[:at])) for at, each in enumerate(content)]
        yield tuple(slots), _padded(_size(content), ALIGNMENT * shards)


def _is_table(record: ParameterRecord) -> bool:
    """Whether it is a table of the vocabulary."""
    return record.place == ("embedding", "loss") or (record.split is not None and record.split.uneven)


def _cut_wholes(held: Sequence[Held], target: int, shards: int) -> list[Placed]:
    """Buckets of matrices with one owner each: blocks are dealt to buckets of like size, and where that leaves more
    than a fifth of a bucket as padding, to fewer."""
    blocks = [list(members) for _, members in groupby(held, key=lambda each: each[0].place)]
    total, placed = _size(held), list[Placed]()
    for number in range(min(len(blocks), -(-total // target)), 0, -1):
        contents: list[list[Held]] = [[] for _ in range(number)]
        before = 0
        for block in blocks:
            contents[(2 * before + _size(block)) * number // (2 * total)] += block  # by the block's middle
            before += _size(block)
        contents = [content for content in contents if content]
        placed = [_pack(content, shards) for content in contents]
        if all(4 * bucket <= 5 * _size(content) for (_, bucket), content in zip(placed, contents, strict=True)):
            break
    return placed


def _pack(content: Sequence[Held], shards: int) -> Placed:
    """The bucket with the smallest slices that cut no matrix: one stack of matrices after the other, large ones first.
    A stack may reach over borders of slices that fall between its matrices."""
    stacks: list[tuple[int, int, Held]] = []  # size of a matrix, and of the stack
    for each in content:
        unit = prod(each[1].shape[each[0].stacked :])
        stacks.append((unit if unit % ALIGNMENT == 0 else each[2], each[2], each))  # unaligned matrices are one piece
    stacks.sort(key=lambda stack: stack[:2], reverse=True)
    least, units = max(-(-_size(content) // shards), stacks[0][0]), {unit for unit, size, _ in stacks if unit < size}
    for step in count():
        smallest, next_ = (_padded(least + least * at // 32, ALIGNMENT) for at in (step, step + 1))
        for slice_size in sorted({smallest, *(size for unit in units if (size := _padded(smallest, unit)) < next_)}):
            slots = _first_fit(stacks, slice_size, slice_size * shards)
            if len(slots) == len(stacks):
                return tuple(sorted(slots, key=lambda slot: slot.start)), slice_size * shards
    raise AssertionError("unreachable: a slice that holds everything is tried in the end")


def _first_fit(stacks: Iterable[tuple[int, int, Held]], slice_size: int, end: int) -> list[BufferSlot]:
    """Slots in [0, end) for stacks, each in the first gap that takes it uncut; a stack that fits nowhere has none."""
    gaps, slots = [(0, end)], []
    for unit, size, (record, of_rank, _) in stacks:
        for at, (low, high) in enumerate(gaps):
            border = (low // slice_size + 1) * slice_size
            tried = (low, low + (border - low) % unit, border, border + slice_size % unit)  # borders may fall between
            uncut = [place for place in tried if place + size <= high and _is_uncut(place, unit, size, slice_size)]
            if uncut:
                gaps[at : at + 1] = [gap for gap in ((low, uncut[0]), (uncut[0] + size, high)) if gap[0] < gap[1]]
                slots.append(BufferSlot(record, of_rank, uncut[0]))
                break
    return slots


def _is_uncut(start: int, unit: int, size: int, slice_size: int) -> bool:
    """Whether borders of slices in the stack at `start` are between matrices: the first, and with it all of them."""
    border = (start // slice_size + 1) * slice_size - start
    return border >= size or (border % unit == 0 and (border + slice_size >= size or slice_size % unit == 0))


def _size(content: Iterable[Held]) -> int:
    return sum(size for _, _, size in content)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

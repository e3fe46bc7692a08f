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
    tied = isinstance(record.place, tuple) and len(record.place) > 1
    return tied or (record.split is not None and record.split.uneven)


def _cut_wholes(held: Sequence[Held], target: int, shards: int) -> list[Placed]:
    """Buckets of matrices with one owner each: blocks are dealt to buckets of like size, and where that leaves too much
    padding, to fewer."""
    blocks = [list(members) for _, members in groupby(held, key=lambda each: each[0].place)]
    total, placed = _size(held), list[Placed | None]()
    for number in range(min(len(blocks), -(-total // target)), 0, -1):
        contents: list[list[Held]] = [[] for _ in range(number)]
        before = 0
        for block in blocks:
            contents[(2 * before + _size(block)) * number // (2 * total)] += block  # by the block's middle
            before += _size(block)
        placed = [_whole(content, shards, tight=number > 1) for content in contents if content]
        if None not in placed:
            break
    return [each for each in placed if each is not None]


def _whole(content: Sequence[Held], shards: int, *, tight: bool) -> Placed | None:
    """Each matrix in one slice; None where more than a fifth is padding, if it is to be `tight`."""
    stacks = []
    for record, of_rank, size in content:
        unit, number = prod(of_rank.shape[record.stacked :]), prod(of_rank.shape[: record.stacked])
        # A stack of matrices that are not aligned is one piece.
        stacks.append((unit, number) if unit % ALIGNMENT == 0 else (size, 1))
    found = _pack(stacks, shards, ALIGNMENT, most=_size(content) * 5 // 4 if tight else None)
    if found is None:
        return None
    slots = [BufferSlot(*each[:2], start) for each, start in zip(content, found[1], strict=True)]
    return tuple(sorted(slots, key=lambda slot: slot.start)), found[0] * shards


def _pack(
    stacks: Sequence[tuple[int, int]], rooms: int, alignment: int, *, most: int | None = None
) -> tuple[int, list[int]] | None:
    """Pack stacks of matrices into rooms of equal size, so that the wall between two rooms never cuts a matrix. A stack
    is contiguous, and may reach over walls that fall between its matrices.

    The result is the size of the smallest rooms that hold the stacks, (size of a matrix, number of matrices) each,
    and the start of each stack, counted over all rooms. All sizes are multiples of `alignment`. None where all rooms
    together would take more than `most`.
    """
    largest_first = sorted(range(len(stacks)), key=lambda at: stacks[at], reverse=True)
    total, units = sum(unit * number for unit, number in stacks), {unit for unit, number in stacks if number > 1}
    least = max(-(-total // rooms), stacks[largest_first[0]][0])
    for step in count():
        smallest = -(-(least + least * step // 32) // alignment) * alignment
        if most is not None and smallest * rooms > most:
            return None
        for room in sorted({smallest, *(-(-smallest // unit) * unit for unit in units)}):
            starts = _first_fit([stacks[at] for at in largest_first], room, room * rooms)
            if starts is not None and (most is None or room * rooms <= most):
                return room, [start for _, start in sorted(zip(largest_first, starts, strict=True))]
    raise AssertionError("unreachable: a room that holds everything is tried in the end")


def _first_fit(stacks: Sequence[tuple[int, int]], room: int, end: int) -> list[int] | None:
    """Where the stacks start in [0, end), each in the first gap that takes it; None: they do not fit."""
    gaps, starts = [(0, end)], []
    for unit, number in stacks:
        size = unit * number
        for at, (low, high) in enumerate(gaps):
            wall = (low // room + 1) * room
            tried = (low, low + (wall - low) % unit, wall, wall + room % unit)  # walls may fall between matrices there
            start = next(
                (place for place in tried if place + size <= high and _is_uncut(place, unit, size, room)), None
            )
            if start is not None:
                gaps[at : at + 1] = [gap for gap in ((low, start), (start + size, high)) if gap[0] < gap[1]]
                starts.append(start)
                break
        else:
            return None
    return starts


def _is_uncut(start: int, unit: int, size: int, room: int) -> bool:
    """Whether the walls in the stack at `start` are between matrices: the first, and with it all of them."""
    wall = (start // room + 1) * room - start
    return wall >= size or (wall % unit == 0 and (wall + room >= size or room % unit == 0))


def _size(content: Iterable[Held]) -> int:
    return sum(size for _, _, size in content)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

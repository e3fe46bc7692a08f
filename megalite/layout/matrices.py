"""The matrices that a rank owns, and which rank computes with each: plain records, no torch.

The owner of a matrix among data-parallel ranks is who has its slice (buffer_layout.py). Where ranks of tp (of experts,
etp) hold parts of a matrix, those of one place among the data-parallel ranks own the parts of the same matrices, and
one of them, its home, computes with the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from megalite.layout.buffer_layout import BufferLayout, Kind
from megalite.layout.parameters import ParameterRecord, Shard, shard_of


@dataclass(frozen=True)
class OwnedMatrix:
    """A matrix of a parameter, or with `record.heads` its queries, keys and values: what the rank has of it are the
    elements [start, stop) of its slice of bucket number `bucket`."""

    record: ParameterRecord
    bucket: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole, [..., r, c]."""
        return self.record.shape[self.record.stacked :]

    def shards(self, ranks: int) -> tuple[Shard, ...]:
        """What each of the ranks of the axis holds of it."""
        split = self.record.split
        split = None if split is None else replace(split, dim=split.dim - (self.record.stacked or 0))
        return tuple(shard_of(self.shape, split, ranks, index) for index in range(ranks))


def owned_matrices(layout: BufferLayout, kind: Kind, index: int) -> list[OwnedMatrix]:
    """The matrices of the rank at place `index` of those that share the kind's state, in the order of its slices."""
    found = []
    for number, bucket in enumerate(layout.buckets):
        first = bucket.slice_size * index
        for slot in bucket.slots if bucket.whole and bucket.kind == kind else ():
            size = prod(slot.shard.shape[slot.record.stacked :])
            for start in range(slot.start - first, slot.stop - first, size):
                if 0 <= start < bucket.slice_size:
                    found.append(OwnedMatrix(slot.record, number, start, start + size))
    return found


def homes_of(matrices: Sequence[OwnedMatrix], ranks: int) -> list[int]:
    """The rank, of so many, that computes with each: the dearest first, each by the rank with the least to do."""
    load, homes = [0] * ranks, [0] * len(matrices)
    for at in sorted(range(len(matrices)), key=lambda at: -matrices[at].record.work):
        homes[at] = load.index(min(load))
        load[homes[at]] += matrices[at].record.work
    return homes


def work_of_ranks(layout: BufferLayout, kind: Kind, owners: int, ranks: int) -> list[int]:
    """The floating-point operations of a Newton-Schulz polynomial on each of `ranks`, the homes, of each owner."""
    work = []
    for index in range(owners):
        matrices = owned_matrices(layout, kind, index)
        load = [0] * ranks
        for each, home in zip(matrices, homes_of(matrices, ranks), strict=True):
            load[home] += each.record.work
        work += load
    return work

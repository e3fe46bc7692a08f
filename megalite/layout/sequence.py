"""Who holds which places of a sequence, and which scores that leaves to compute: context parallelism as numbers.

cp = ring x alltoall ranks share every sequence; rank i has part i % alltoall of block i // alltoall. A sequence is cut
into one block for each rank of the ring, a block into one part for each of the `alltoall` neighbours that swap heads
for it. Blocks are of equal length and of equal causal work:

- zigzag: of 2 * ring pieces, block r has pieces r and 2 * ring - 1 - r (Llama 3, arXiv 2407.21783, section 3.3.2);
- stripes: block r has every ring-th place from r on (arXiv 2311.09431). It cuts all documents alike.

Places ascend within a block. In packed documents rows of queries are taken a few at a time, and with them only keys
that a row sees in some sequence of the microbatch: work and traffic fall with the documents. No torch import.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Cut = Literal["zigzag", "stripes"]
Rows = tuple[int, int]  # first and last + 1
IntArray = npt.NDArray[np.int64]
QUERIES = 256  # rows of a tile of documents at most


@dataclass(frozen=True)
class CpShard:
    """What one rank holds of each sequence; by default all of it. `index`: its place among the cp ranks."""

    index: int = 0
    ring: int = 1
    alltoall: int = 1

    @property
    def block(self) -> int:
        """Which block it holds a part of: its place in the ring."""
        return self.index // self.alltoall

    def places(self, length: int, cut: Cut = "zigzag") -> IntArray:
        """The places of this rank's part, ascending."""
        parts = np.split(_joined(block_places(length, self.ring, self.block, cut)), self.alltoall)
        return parts[self.index % self.alltoall]


def block_places(length: int, ring: int, block: int, cut: Cut) -> list[range]:
    """The places of a block, ascending."""
    if cut == "stripes":
        return [range(block, length, ring)]
    assert length % (2 * ring) == 0, (length, ring)
    piece = length // (2 * ring)
    return [range(number * piece, (number + 1) * piece) for number in (block, 2 * ring - 1 - block)]


def _joined(pieces: Sequence[range]) -> IntArray:
    return np.concatenate([np.arange(each.start, each.stop, each.step) for each in pieces])


@dataclass(frozen=True)
class Tile:
    """A rectangle of scores: rows of the own block's queries, and of a block's keys."""

    queries: Rows
    keys: Rows
    causal: bool = False  # a square: query i sees its keys 0..i
    masked: bool = False  # places and documents say what counts; otherwise all of it

    @property
    def scores(self) -> int:
        """Elements that count; of a masked tile, all."""
        rows, columns = (stop - start for start, stop in (self.queries, self.keys))
        return rows * (rows + 1) // 2 if self.causal else rows * columns


@dataclass(frozen=True)
class AttentionPlan:
    """What one block computes of attention: `tiles` and the rows of keys that they need (`fetched`), of each block."""

    cut: Cut
    tiles: tuple[tuple[Tile, ...], ...]
    fetched: tuple[Rows, ...]
    sent: tuple[Rows, ...]  # the rows of the own block that each other one needs
    partial: bool = False  # documents: not all rows travel

    @cached_property
    def scores(self) -> int:
        return sum(tile.scores for tiles in self.tiles for tile in tiles)


def causal_plan(share: CpShard, length: int) -> AttentionPlan:
    """The plan of sequences that are one document each, cut zigzag. All keys travel, so that every rank sends as much
    as it receives. Queries see half of each block before their own; half of the queries see the blocks behind it."""
    rows = length // share.ring
    half, everything = rows // 2, (0, rows)
    tiles = (
        *[(Tile(everything, (0, half)),)] * share.block,
        (Tile(everything, everything, causal=True),),
        *[(Tile((half, rows), everything),)] * (share.ring - share.block - 1),
    )
    return AttentionPlan("zigzag", tiles, (everything,) * share.ring, (everything,) * share.ring)


def starts_of(documents: npt.NDArray[np.int32]) -> IntArray:
    """The place at which the document of each token starts [b, s], from the documents' numbers, which ascend."""
    places = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    first = np.diff(documents, axis=1, prepend=documents[:, :1] - 1) != 0
    return np.maximum.accumulate(np.where(first, places, 0), axis=1)


def document_plan(share: CpShard, starts: IntArray) -> AttentionPlan:
    """The plan of packed documents that start at `starts` [b, s], with the cut whose busiest block computes less;
    of equal cuts zigzag, which fetches less. The same cut on all ranks."""
    ways = (_document_plans(share.ring, starts, cut) for cut in get_args(Cut))
    return min(ways, key=lambda plans: max(plan.scores for plan in plans))[share.block]


def _document_plans(ring: int, starts: IntArray, cut: Cut) -> list[AttentionPlan]:
    """The plans of all blocks."""
    blocks = [_joined(block_places(starts.shape[1], ring, block, cut)) for block in range(ring)]
    table = [tuple(tuple(_tiles(starts, own, source)) for source in blocks) for own in blocks]
    needs = [tuple(map(_rows, of_block)) for of_block in table]
    sent = zip(*needs, strict=True)
    return [AttentionPlan(cut, *each, partial=True) for each in zip(table, needs, sent, strict=True)]


def _tiles(starts: IntArray, queries: IntArray, keys: IntArray) -> Iterator[Tile]:
    """For the queries at these places: keys that some see, apart from those that all see."""
    half, last = len(queries) // 2, len(queries)
    edges = [*range(0, half, QUERIES), *range(half, last, QUERIES), last]
    for start, stop in pairwise(edges):  # none over the gap between two pieces
        places = queries[start:stop]
        begins = starts[:, places]
        low, all_low = np.searchsorted(keys, [begins.min(), begins.max()]).tolist()
        high, all_high = np.searchsorted(keys, [places[-1], places[0]], side="right").tolist()
        if all_high - all_low < min(QUERIES, high - low):
            parts: Sequence[tuple[int, int, bool]] = [(low, high, True)]
        else:
            parts = [(low, all_low, True), (all_low, all_high, False), (all_high, high, True)]
        for key_start, key_stop, masked in parts:
            if key_stop > key_start:
                yield Tile((start, stop), (key_start, key_stop), masked=masked)


def _rows(tiles: Sequence[Tile]) -> Rows:
    """The keys that tiles need, from the first to the last."""
    return (min(tile.keys[0] for tile in tiles), max(tile.keys[1] for tile in tiles)) if tiles else (0, 0)

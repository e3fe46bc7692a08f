"""Who holds which places of a sequence, and which scores that leaves to compute: context parallelism as numbers.

cp = ring x alltoall ranks share every sequence; rank i has part i % alltoall of block i // alltoall. A sequence is cut
into one block for each rank of the ring, a block into one part for each of the `alltoall` neighbours that swap heads
for it. Blocks are of equal length and of equal causal work:

- zigzag: of 2 * ring pieces, block r has pieces r and 2 * ring - 1 - r (Llama 3, arXiv 2407.21783, section 3.3.2);
- stripes: block r has every ring-th place from r on (arXiv 2311.09431). It cuts all documents alike.

Places ascend within a block. No torch import.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Cut = Literal["zigzag", "stripes"]
Rows = tuple[int, int]  # first and last + 1


@dataclass(frozen=True)
class SequenceShare:
    """What one rank holds of each sequence; by default all of it. `index`: its place among the cp ranks."""

    index: int = 0
    ring: int = 1
    alltoall: int = 1

    @property
    def block(self) -> int:
        """Which block it holds a part of: its place in the ring."""
        return self.index // self.alltoall

    def places(self, length: int, cut: Cut = "zigzag") -> list[range]:
        """The places of this rank's part, ascending."""
        rows, found = length // (self.ring * self.alltoall), []
        start = self.index % self.alltoall * rows  # of its part, in what is left of the block
        for piece in block_places(length, self.ring, self.block, cut):
            found.append(piece[max(0, start) : max(0, start + rows)])
            start -= len(piece)
        return [piece for piece in found if piece]


def block_places(length: int, ring: int, block: int, cut: Cut) -> list[range]:
    """The places of a block, ascending."""
    if cut == "stripes":
        return [range(block, length, ring)]
    assert length % (2 * ring) == 0, (length, ring)
    piece = length // (2 * ring)
    return [range(number * piece, (number + 1) * piece) for number in (block, 2 * ring - 1 - block)]


@dataclass(frozen=True)
class Tile:
    """A rectangle of scores: rows of the own block's queries, and of a block's keys.

    All of it counts; if `causal`, a square, query i sees its keys 0..i; if `masked`, places and documents say it.
    """

    queries: Rows
    keys: Rows
    causal: bool = False
    masked: bool = False

    @property
    def scores(self) -> int:
        """Elements that count; of a masked tile, all."""
        rows, columns = (stop - start for start, stop in (self.queries, self.keys))
        return rows * (rows + 1) // 2 if self.causal else rows * columns


def causal_tile(ring: int, own: int, source: int, rows: int, cut: Cut) -> Tile:
    """What the queries of block `own` see of the keys of block `source` in a causal sequence; each has so many rows."""
    half, everything = rows // 2, (0, rows)
    if source == own or (cut == "stripes" and source < own):
        return Tile(everything, everything, causal=True)
    if cut == "stripes":  # of equal number, the key lies one place or more behind the query
        return Tile((1, rows), (0, rows - 1), causal=True)
    return Tile(everything, (0, half)) if source < own else Tile((half, rows), everything)


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


def causal_plan(share: SequenceShare, length: int, cut: Cut = "zigzag") -> AttentionPlan:
    """The plan of sequences that are one document each. All keys travel, so that every rank sends as much as it
    receives."""
    rows = length // share.ring
    tiles = [(causal_tile(share.ring, share.block, source, rows, cut),) for source in range(share.ring)]
    everything = ((0, rows),) * share.ring
    return AttentionPlan(cut, tuple(tiles), everything, everything)

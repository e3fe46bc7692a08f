"""Which scores of packed documents a block computes, and which keys it needs for them. No torch import.

A token sees the tokens of its document up to itself. Rows of queries are taken a few at a time; of keys, only those
that one of these rows sees in some sequence of the microbatch. Work and traffic fall with the documents.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megalite.layout.sequence import AttentionPlan, Cut, Rows, SequenceShare, Tile, block_places, causal_tile

IntArray = npt.NDArray[np.int64]
QUERIES = 256  # rows of a tile at most


def starts_of(documents: npt.NDArray[np.int32]) -> IntArray:
    """The place at which the document of each token starts [b, s], from the documents' numbers, which ascend."""
    places = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    first = np.diff(documents, axis=1, prepend=documents[:, :1] - 1) != 0
    return np.maximum.accumulate(np.where(first, places, 0), axis=1)


def document_plan(share: SequenceShare, starts: IntArray) -> AttentionPlan:
    """The plan of packed documents that start at `starts` [b, s], with the cut whose busiest block computes less;
    of equal cuts zigzag, which fetches less. The same cut on all ranks."""
    cuts: tuple[Cut, ...] = ("zigzag", "stripes")
    ways = {cut: _all_tiles(share.ring, starts, cut) for cut in cuts}
    busiest = {cut: max(sum(tile.scores for tiles in way for tile in tiles) for way in ways[cut]) for cut in cuts}
    cut = min(cuts, key=busiest.__getitem__)
    mine = ways[cut][share.block]
    sent = tuple(_rows(tiles[share.block]) for tiles in ways[cut])
    return AttentionPlan(cut, mine, tuple(map(_rows, mine)), sent, partial=True)


def _all_tiles(ring: int, starts: IntArray, cut: Cut) -> list[tuple[tuple[Tile, ...], ...]]:
    """The tiles by block of queries and block of keys."""
    length = starts.shape[1]
    pieces = [block_places(length, ring, block, cut) for block in range(ring)]
    blocks = [np.concatenate([np.arange(each.start, each.stop, each.step) for each in block]) for block in pieces]

    def tiles(queries: int, keys: int) -> tuple[Tile, ...]:
        base = causal_tile(ring, queries, keys, length // ring, cut)
        return tuple(_tiles(starts, blocks[queries], blocks[keys], base.queries))

    return [tuple(tiles(own, source) for source in range(ring)) for own in range(ring)]


def _tiles(starts: IntArray, queries: IntArray, keys: IntArray, rows: Rows) -> Iterator[Tile]:
    """For `rows` of the queries at these places: keys that some see, apart from those that all see."""
    half, (first, last) = len(queries) // 2, rows
    edges = sorted({*range(first, half, QUERIES), *range(max(first, half), last, QUERIES), last})
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

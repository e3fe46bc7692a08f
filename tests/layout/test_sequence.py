"""Every place of a sequence is on one rank, and every score that counts is computed once."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.layout import sequence
from megalite.layout.sequence import (
    AttentionPlan,
    CpShard,
    Cut,
    block_places,
    causal_plan,
    document_plan,
    starts_of,
)

Counts = npt.NDArray[np.int64]
CUTS: tuple[Cut, ...] = ("zigzag", "stripes")


@st.composite
def shares(draw: st.DrawFn) -> tuple[int, int, int]:
    """ring, alltoall, length"""
    ring, alltoall = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    return ring, alltoall, 2 * ring * alltoall * draw(st.integers(1, 6))


@st.composite
def packed(draw: st.DrawFn) -> tuple[int, npt.NDArray[np.int32]]:
    """ring, and documents [b, s] of any lengths"""
    ring = draw(st.integers(2, 4))
    length = 2 * ring * draw(st.integers(1, 12))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        ends = draw(st.sets(st.integers(1, length - 1), max_size=draw(st.sampled_from([0, 3, length]))))
        rows.append(np.isin(np.arange(length), [*ends]).cumsum())
    return ring, np.stack(rows).astype(np.int32)


def places_of(length: int, ring: int, block: int, cut: Cut) -> list[int]:
    return [place for each in block_places(length, ring, block, cut) for place in each]


@given(shares(), st.sampled_from(CUTS))
def test_ranks_hold_every_place_once_in_ascending_parts_of_a_block(sizes: tuple[int, int, int], cut: Cut) -> None:
    ring, alltoall, length = sizes
    held = [CpShard(index, ring, alltoall).places(length, cut).tolist() for index in range(ring * alltoall)]
    assert sorted(place for part in held for place in part) == list(range(length))
    for block in range(ring):
        parts = held[block * alltoall : (block + 1) * alltoall]
        whole = [place for part in parts for place in part]
        assert whole == places_of(length, ring, block, cut) == sorted(whole)
        assert {len(part) for part in parts} == {length // ring // alltoall}


def computed(plan: AttentionPlan, source: int, shape: tuple[int, int], visible: npt.NDArray[np.bool_]) -> Counts:
    """How many times a plan counts each score of a block's keys; `visible` is what a mask lets pass."""
    counts = np.zeros(shape, dtype=np.int64)
    for tile in plan.tiles[source]:
        rows, columns = slice(*tile.queries), slice(*tile.keys)
        part = visible[rows, columns] if tile.masked else np.ones_like(counts[rows, columns])
        counts[rows, columns] += np.tril(part) if tile.causal else part
    return counts


def causal(block: int, ring: int, length: int, cut: Cut) -> AttentionPlan:
    """The plan of one document; stripes are cut for packed ones alone."""
    if cut == "zigzag":
        return causal_plan(CpShard(block, ring), length)
    return sequence._document_plans(ring, np.zeros((1, length), dtype=np.int64), cut)[block]


@given(shares(), st.sampled_from(CUTS))
def test_tiles_hold_every_causal_score_once(sizes: tuple[int, int, int], cut: Cut) -> None:
    ring, _, length = sizes
    blocks = [np.array(places_of(length, ring, block, cut)) for block in range(ring)]
    for own in range(ring):
        plan = causal(own, ring, length, cut)
        for source in range(ring):
            seen = blocks[own][:, None] >= blocks[source]
            assert np.array_equal(computed(plan, source, seen.shape, seen), seen)


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
@pytest.mark.parametrize(("cut", "apart"), [("zigzag", 0.0), ("stripes", 0.05)])
def test_blocks_have_equal_work(monkeypatch: pytest.MonkeyPatch, ring: int, cut: Cut, apart: float) -> None:
    """All that a block computes, and exactly half of all scores among it."""
    monkeypatch.setattr(sequence, "QUERIES", 8)
    blocks = [np.array(places_of(64 * ring, ring, block, cut)) for block in range(ring)]
    plans = [causal(block, ring, 64 * ring, cut) for block in range(ring)]
    sees = [[own[:, None] >= source for source in blocks] for own in blocks]
    seen = [computed(plan, at, (64, 64), sees[own][at]).sum() for own, plan in enumerate(plans) for at in range(ring)]
    scores = [plan.scores for plan in plans]
    assert sum(seen) == 64 * ring * (64 * ring + 1) // 2
    assert sum(seen) <= sum(scores) <= (1 + 3 * apart) * sum(seen)
    assert max(scores) <= (1 + apart) * sum(scores) / ring


@given(packed(), st.sampled_from([3, 256]))
def test_document_tiles_hold_every_score_once_and_need_no_key_that_is_not_fetched(
    drawn: tuple[int, npt.NDArray[np.int32]], rows: int
) -> None:
    ring, documents = drawn
    length, starts = documents.shape[1], starts_of(documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "QUERIES", rows)
        plans = [document_plan(CpShard(block, ring), starts) for block in range(ring)]
    cut = plans[0].cut
    blocks = [np.array(places_of(length, ring, block, cut)) for block in range(ring)]
    for own, plan in enumerate(plans):
        assert plan.cut == cut
        for source in range(ring):
            causal = blocks[own][:, None] >= blocks[source]
            for row in documents:
                seen = causal & (row[blocks[own]][:, None] == row[blocks[source]])
                assert np.array_equal(computed(plan, source, seen.shape, seen), seen)
                needed = np.flatnonzero(seen.any(0))
                assert all(plan.fetched[source][0] <= key < plan.fetched[source][1] for key in needed)
            assert plan.fetched[source] == plans[source].sent[own]


def test_work_and_traffic_fall_with_the_documents() -> None:
    share = CpShard(0, 2)
    short = document_plan(share, starts_of(np.arange(8192, dtype=np.int32)[None] // 256))
    whole = document_plan(share, starts_of(np.zeros((1, 8192), dtype=np.int32)))
    assert short.scores < 0.07 * whole.scores
    rows = [[stop - start for start, stop in plan.fetched[1:]] for plan in (short, whole)]
    assert rows == [[0], [4096]]  # no document lies over the cut

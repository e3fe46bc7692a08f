"""Every box is written once, by a rank that holds it, and the load is level; a state that is not whole is refused."""

from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.checkpoint.pieces import Piece, boxes
from megalite.checkpoint.writing import HeldBox, plan_writes, stored_tensors

KINDS = (torch.float32, torch.bfloat16, torch.float64)


@st.composite
def held_by_ranks(draw: st.DrawFn) -> list[list[Piece]]:
    """Pieces by rank: each tensor cut at random places of its flat range, each part held by one rank or several."""
    ranks = draw(st.integers(1, 5))
    held_by: list[list[Piece]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        tensor = torch.zeros(shape, dtype=draw(st.sampled_from(KINDS)))
        cuts = draw(st.lists(st.integers(0, prod(shape)), max_size=4))
        places = sorted({0, prod(shape), *cuts})
        for start, stop in pairwise(places):
            holders = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
            for offsets, sizes, _ in boxes(start, stop, shape):
                for rank in holders:
                    held_by[rank].append(Piece(f"t{number}", shape, offsets, tensor.new_zeros(sizes)))
    return held_by


def held(pieces: list[Piece]) -> list[HeldBox]:
    return [HeldBox.of(piece) for piece in pieces]


@given(held_by_ranks())
def test_every_box_is_written_once_by_a_rank_that_holds_it(held_by: list[list[Piece]]) -> None:
    boxes_of = [held(pieces) for pieces in held_by]
    plan = plan_writes(boxes_of)
    written = [boxes[at] for boxes, chosen in zip(boxes_of, plan, strict=True) for at in chosen]
    assert len(written) == len(set(written))
    assert set(written) == {box for boxes in boxes_of for box in boxes}


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 5))
def test_replicas_are_spread_to_within_the_largest_box(sizes: list[int], ranks: int) -> None:
    pieces = [Piece(f"t{number}", (size,), (0,), torch.zeros(size)) for number, size in enumerate(sizes)]
    plan = plan_writes([held(pieces)] * ranks)
    loads = [sum(sizes[at] for at in chosen) for chosen in plan]
    assert max(loads) - min(loads) <= max(sizes)
    if len(sizes) >= ranks:
        assert min(loads) > 0


def whole(name: str, *shape: int) -> Piece:
    return Piece(name, shape, (0,) * len(shape), torch.zeros(shape))


def test_a_gap_and_an_overlap_are_bugs() -> None:
    rows = [Piece("w", (4, 3), (first, 0), torch.zeros(2, 3)) for first in (0, 2)]
    stored_tensors([held(rows[:1]), held(rows[1:])])
    with pytest.raises(AssertionError, match="not whole: w has data for 6 of its 12"):
        stored_tensors([held(rows[:1]), []])
    with pytest.raises(AssertionError, match="not whole: w has data for 18 of its 12"):
        stored_tensors([held(rows), held([whole("v", 1), Piece("w", (4, 3), (1, 0), torch.zeros(2, 3))])])


def test_boxes_that_do_not_belong_together_are_bugs() -> None:
    with pytest.raises(AssertionError, match="rank 0 holds a box twice"):
        plan_writes([held([whole("w", 2), whole("w", 2)])])
    with pytest.raises(AssertionError, match="boxes of w differ"):
        stored_tensors([held([whole("w", 2), Piece("w", (3,), (2,), torch.zeros(1))])])
    with pytest.raises(AssertionError, match="boxes of w differ"):
        stored_tensors([held([whole("w", 2)]), held([replace(whole("w", 2), tensor=torch.zeros(2).double())])])

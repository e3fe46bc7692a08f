"""Boxes: a flat range of a tensor is a few boxes that hold each of its elements once."""

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.checkpoint.manifest import boxes, is_tiled

SHAPES = st.lists(st.integers(1, 5), max_size=5).map(tuple)


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...]]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, prod(shape)))
    return start, draw(st.integers(start, prod(shape))), shape


@given(flat_ranges())
def test_boxes_hold_the_flat_range_in_order_and_nothing_else(case: tuple[int, int, tuple[int, ...]]) -> None:
    start, stop, shape = case
    indices = torch.arange(prod(shape)).view(shape)
    at = start
    for offsets, sizes, flat_start in boxes(start, stop, shape):
        box = indices[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert flat_start == at
        assert box.reshape(-1).tolist() == list(range(at, at + prod(sizes)))
        at += prod(sizes)
    assert at == stop
    assert len(boxes(*case)) <= max(1, 2 * len(shape) - 1)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A tensor and the boxes of all ranks of some ZeRO-1 layout of it, in any order."""
    shape = draw(SHAPES)
    inner = draw(st.lists(st.integers(0, prod(shape)), max_size=4))
    marks = sorted({0, prod(shape), *inner})
    parts = [box[:2] for a, b in pairwise(marks) for box in boxes(a, b, shape)]
    return shape, draw(st.permutations(parts))


@given(cut_tensors(), st.data())
def test_the_ranks_of_any_flat_layout_tile_the_tensor_until_a_part_is_lost_doubled_or_moved(
    case: tuple, data: st.DataObject
) -> None:
    shape, parts = case
    assert is_tiled(shape, parts)
    index = data.draw(st.integers(0, len(parts) - 1))
    lost = [part for at, part in enumerate(parts) if at != index]
    assert not is_tiled(shape, lost)
    assert not is_tiled(shape, [*parts, parts[index]])
    if shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        offsets, sizes = parts[index]
        moved = tuple(at + (here == dim) for here, at in enumerate(offsets))
        assert not is_tiled(shape, [*lost, (moved, sizes)])


@pytest.mark.parametrize("part", [((0,), (3,)), ((0, 0), (3,)), ((-1, 0), (2, 2)), ((2, 2), (-2, -2))])
def test_a_part_of_another_form_is_a_fault(part: tuple) -> None:
    assert not is_tiled((2, 2), [part])


def test_many_ranks_cost_as_many_steps() -> None:
    """All parts begin at one place of the longest dimension: a comparison of pairs would take minutes."""
    parts = [((row, 0), (1, 40_000)) for row in range(20_000)]
    assert is_tiled((20_000, 40_000), parts)

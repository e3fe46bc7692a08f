"""A blend gives every part its share at every moment, as a pure function of the sample's number."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.samples import BLOCK, Blend, integer_weights

weights = st.lists(st.floats(1e-6, 1e3, allow_nan=False), min_size=1, max_size=8)


@given(weights=weights, samples=st.integers(0, 10**12))
@settings(max_examples=200, deadline=None)
def test_counts_sum_to_the_samples_and_never_shrink(weights: list[float], samples: int) -> None:
    blend = Blend(integer_weights(weights))
    before, after = blend.counts(samples), blend.counts(samples + 1)
    assert sum(before) == samples
    assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0] * (len(weights) - 1) + [1]


@given(weights=weights)
@settings(max_examples=30, deadline=None)
def test_every_sample_of_every_part_is_given_once_and_in_order(weights: list[float]) -> None:
    parts, numbers = Blend(integer_weights(weights)).locate(np.arange(3 * BLOCK))
    for part in range(len(weights)):
        mine = numbers[parts == part]
        assert np.array_equal(mine, np.arange(len(mine)))


@given(weights=weights)
@settings(max_examples=30, deadline=None)
def test_the_index_of_a_sample_is_where_it_is(weights: list[float]) -> None:
    blend = Blend(integer_weights(weights))
    parts, numbers = blend.locate(np.arange(BLOCK))
    for index, (part, number) in enumerate(zip(parts.tolist(), numbers.tolist(), strict=True)):
        assert blend.index(part, number) == index


@pytest.mark.parametrize("given", [[0.5, 0.3, 0.2], [1e-3, 1.0], [7, 1, 1, 1]])
def test_shares_hold_at_every_moment_not_only_in_the_end(given: list[float]) -> None:
    parts, _ = Blend(integer_weights(given)).locate(np.arange(4 * BLOCK))
    shares = np.array(given) / sum(given)
    for samples in (10, 100, 1000, BLOCK + 1, 4 * BLOCK):
        counts = np.bincount(parts[:samples], minlength=len(given))
        assert np.abs(counts - shares * samples).max() <= 2


def test_any_slice_equals_the_same_slice_of_the_whole() -> None:
    blend = Blend(integer_weights([0.7, 0.2, 0.1]))
    parts, numbers = blend.locate(np.arange(5000))
    slice_parts, slice_numbers = blend.locate(np.arange(1000, 2100))
    assert np.array_equal(slice_parts, parts[1000:2100])
    assert np.array_equal(slice_numbers, numbers[1000:2100])

"""The sample order is a shuffle: every sample once per epoch, and every epoch another order."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.samples import permute, round_keys


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_every_index_appears_exactly_once(size: int, seed: int, epoch: int) -> None:
    shuffled = permute(np.arange(size), size, round_keys(seed, 0, epoch))
    assert np.array_equal(np.sort(shuffled), np.arange(size))


@given(
    size=st.integers(2**33, 2**62), indices=st.lists(st.integers(0, 2**33 - 1), min_size=2, max_size=50, unique=True)
)
@settings(max_examples=50, deadline=None)
def test_huge_sizes_stay_in_range_and_never_collide(size: int, indices: list[int]) -> None:
    shuffled = permute(np.array(indices), size, round_keys(1, 0, 0))
    assert len(set(shuffled.tolist())) == len(indices)
    assert shuffled.min() >= 0
    assert shuffled.max() < size


def test_one_element_equals_the_whole_order() -> None:
    keys = round_keys(7, 0, 3)
    whole = permute(np.arange(1000), 1000, keys)
    assert permute(np.array([123]), 1000, keys)[0] == whole[123]


def test_epochs_parts_and_seeds_have_orders_of_their_own() -> None:
    orders = [permute(np.arange(1000), 1000, round_keys(*key)) for key in ((1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0))]
    for number, order in enumerate(orders):
        for other in orders[:number]:
            assert np.sum(order == other) < 10  # two random orders agree in one place on average


def test_the_order_looks_random() -> None:
    """Neighbours do not stay neighbours, and every index is as likely in the first tenth as anywhere."""
    size, first = 1000, np.zeros(1000)
    for epoch in range(400):
        order = permute(np.arange(size), size, round_keys(5, 0, epoch))
        assert np.sum(np.abs(np.diff(order)) == 1) < 15
        first[order[:100]] += 1
    assert abs(first.mean() - 40) < 1e-9
    assert 0.8 < first.var() / 36 < 1.25  # binomial(400, 0.1) has variance 36


def test_the_order_is_the_same_for_ever() -> None:
    """A checkpoint stores one number; the order behind it must not change with a release."""
    assert permute(np.arange(10), 10, round_keys(1234, 0, 0)).tolist() == [9, 3, 8, 5, 6, 0, 4, 7, 1, 2]

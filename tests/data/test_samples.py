"""Samples cover the data once per epoch, in an order that depends on the seed, and know their documents; a blend gives
every part its share at every moment.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.samples import BLOCK, Blend, Part, SampleSource, integer_weights, permute, round_keys
from megalite.data.token_file import TokenFile
from megalite.errors.problems import UserError

WriteTokens = Callable[..., Path]
weights = st.lists(st.floats(1e-6, 1e3, allow_nan=False), min_size=1, max_size=8)


def source(
    *files: TokenFile,
    weights: tuple[int, ...] = (1,),
    seed: int | None = 1,
    vocab_size: int = 1000,
    seq_length: int = 4,
) -> SampleSource:
    parts = [Part(file, 0, len(file.tokens)) for file in files]
    return SampleSource(parts, weights, seq_length, vocab_size, seed, None)


def counting(write_tokens: WriteTokens, name: str, first: int, stop: int) -> TokenFile:
    return TokenFile.open(write_tokens(name, [list(range(first, stop))]))


def test_an_epoch_has_every_window_once_overlapping_by_one_token(write_tokens: WriteTokens) -> None:
    data = source(counting(write_tokens, "a", 0, 43))
    assert data.without_repeats() == 10  # 40 labels; the last two tokens do not fill a sample
    rows, _, _ = data.read(np.arange(10))
    assert sorted(rows.tolist()) == [list(range(4 * window, 4 * window + 5)) for window in range(10)]
    assert rows[:, 0].tolist() != sorted(rows[:, 0].tolist())


def test_a_sample_does_not_depend_on_what_is_read_with_it(write_tokens: WriteTokens) -> None:
    data = source(counting(write_tokens, "a", 0, 200), counting(write_tokens, "b", 500, 900), weights=(1, 3))
    whole = data.read(np.arange(500))[0]
    for index in (0, 17, 49, 50, 499):
        assert np.array_equal(data.read(np.array([index]))[0][0], whole[index])


def test_parts_of_a_blend_come_in_their_shares_each_in_whole_epochs(write_tokens: WriteTokens) -> None:
    small, large = counting(write_tokens, "a", 0, 41), counting(write_tokens, "b", 500, 901)
    data = source(small, large, weights=(1, 3))
    rows, parts, _ = data.read(np.arange(120))
    assert np.bincount(parts).tolist() == [30, 90]
    assert (rows[parts == 0] < 500).all()
    first = rows[parts == 0][:, 0]
    epochs = first.reshape(3, 10).tolist()
    assert [sorted(epoch) for epoch in epochs] == [list(range(0, 40, 4))] * 3
    assert len({*map(tuple, epochs)}) == 3, "each in an order of its own"
    assert data.epochs(120) == [3.0, 0.9]
    assert data.without_repeats() == 41  # 10 samples of the small part, then its second epoch begins


@pytest.mark.parametrize("weights", [(8, 1), (1, 1), (1, 3), (5, 2), (97, 3)])
@pytest.mark.parametrize("held", [(12, 1), (1, 12), (7, 7), (1, 1)])
def test_samples_without_repeats_are_counted_exactly(
    write_tokens: WriteTokens, weights: tuple[int, int], held: tuple[int, int]
) -> None:
    files = [counting(write_tokens, name, 0, 4 * samples + 1) for name, samples in zip("ab", held, strict=True)]
    data = source(*files, weights=weights, seed=None)
    _, parts, starts = data.read(np.arange(data.without_repeats() + 1))
    places = list(zip(parts.tolist(), starts.tolist(), strict=True))
    first_repeat = next(index for index, place in enumerate(places) if place in places[:index])
    assert data.without_repeats() == first_repeat


def test_documents_and_positions_restart_where_documents_begin(write_tokens: WriteTokens) -> None:
    file = TokenFile.open(write_tokens("three", [[1, 1], [2, 2, 2], [], [3, 3, 3, 3]]))
    data = source(file, seed=None)
    rows, parts, starts = data.read(np.arange(2))
    documents, positions = data.documents(parts, starts)
    assert rows[:, :-1].tolist() == [[1, 1, 2, 2], [2, 3, 3, 3]]
    assert documents.tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]
    assert positions.tolist() == [[0, 1, 0, 1], [0, 0, 1, 2]]


@pytest.mark.parametrize("bad", [-1, 90, 91])
def test_an_id_beyond_the_vocabulary_is_named_when_it_is_read(write_tokens: WriteTokens, bad: int) -> None:
    prefix = write_tokens("bad", [[1] * 6, [2, 2, bad, 2, 2, 2, 2]], 70_000)
    data = source(TokenFile.open(prefix), seed=None, vocab_size=90)
    data.read(np.array([0]))
    with pytest.raises(
        UserError, match=rf"bad\.bin.*token id {bad} at token 8 \(document 1, sample 1\).*vocabulary of 90"
    ):
        data.read(np.array([0, 1]))


@pytest.mark.parametrize(("now", "passed_over"), [(8, 4), (9, 8), (14, 0), (28, 0)])
def test_longer_samples_in_the_order_of_the_file_repeat_and_skip_no_token(
    write_tokens: WriteTokens, now: int, passed_over: int
) -> None:
    file = counting(write_tokens, "a", 0, 401)
    labels = source(file, seed=None).read(np.arange(7))[0][:, 1:].ravel()
    first = -(-7 * 4 // now)
    longer = source(file, seed=None, seq_length=now).read(np.arange(first, first + 5))[0][:, 1:].ravel()
    assert labels.tolist() == list(range(1, 29))
    assert longer.tolist() == list(range(29 + passed_over, 29 + passed_over + 5 * now))


def test_of_a_shuffled_epoch_longer_samples_read_again_the_share_that_was_read(write_tokens: WriteTokens) -> None:
    """docs/training.md: f (1 - f) of the epoch twice, and as much not at all."""
    file = counting(write_tokens, "a", 0, 16001)
    for share in (0.25, 0.5):
        consumed = int(share * 4000)
        read = source(file, vocab_size=16001).read(np.arange(consumed))[0][:, 1:]
        longer = source(file, vocab_size=16001, seq_length=8)
        rest = longer.read(np.arange(consumed // 2, 2000))[0][:, 1:]
        assert abs(len(np.intersect1d(read, rest)) / 16000 - share * (1 - share)) < 0.02


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

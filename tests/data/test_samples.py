"""Samples cover the data once per epoch, in an order that depends on the seed, and know their documents."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megalite.data.samples import Part, SampleSource
from megalite.data.token_file import TokenFile
from megalite.errors.problems import UserError

WriteTokens = Callable[..., Path]


def source(
    *files: TokenFile, weights: tuple[int, ...] = (1,), seed: int | None = 1, vocab_size: int = 1000
) -> SampleSource:
    parts = [Part(file, 0, len(file.tokens)) for file in files]
    return SampleSource(parts, weights, 4, vocab_size, seed, None)


def counting(write_tokens: WriteTokens, name: str, first: int, stop: int) -> TokenFile:
    return TokenFile.open(write_tokens(name, [list(range(first, stop))]))


def test_an_epoch_has_every_window_once_overlapping_by_one_token(write_tokens: WriteTokens) -> None:
    data = source(counting(write_tokens, "a", 0, 43))
    assert data.without_repeats() == 10  # 40 labels; the last two tokens do not fill a sample
    rows, _, _ = data.read(np.arange(10))
    assert sorted(rows.tolist()) == [list(range(4 * window, 4 * window + 5)) for window in range(10)]
    assert rows[:, 0].tolist() != sorted(rows[:, 0].tolist())


def test_every_epoch_has_every_sample_in_a_new_order(write_tokens: WriteTokens) -> None:
    data = source(counting(write_tokens, "a", 0, 401))
    epochs = [data.read(np.arange(100 * epoch, 100 * epoch + 100))[0][:, 0] for epoch in range(3)]
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(0, 400, 4))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])


def test_the_seed_decides_the_order_and_none_keeps_it(write_tokens: WriteTokens) -> None:
    file = counting(write_tokens, "a", 0, 401)
    orders = [source(file, seed=seed).read(np.arange(100))[0][:, 0].tolist() for seed in (1, 1, 2, None)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[3] == list(range(0, 400, 4))


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
    for epoch in range(3):
        assert sorted(first[10 * epoch : 10 * epoch + 10].tolist()) == list(range(0, 40, 4))
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

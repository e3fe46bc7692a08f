"""Opening: the split, the vocabulary, the tokenizer and the fingerprint come from the data, at any size."""

import json
import os
import re
import shutil
import string
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.config.schema import Config
from megalite.config.settings import with_values
from megalite.data import open as open_module
from megalite.data.open import note_changed_files, open_data
from megalite.data.tokenizers import byte_tokenizer
from megalite.errors.problems import UserError
from megalite.prepare.prepare import char_tokenizer, prepare, prepare_file
from megalite.prepare.sources import Source

WriteTokens = Callable[..., Path]


@pytest.fixture
def tokens(config: Config, write_tokens: WriteTokens) -> Config:
    config.data.source, config.data.path = "tokens", str(write_tokens("a", [list(range(100))] * 20))
    return config


def test_the_split_is_nanogpts(tokens: Config) -> None:
    data = open_data(tokens, prepare(tokens))
    assert data.validation is not None
    assert [(part.first, part.stop) for part in data.train.parts] == [(0, 1800)]
    assert [(part.first, part.stop) for part in data.validation.parts] == [(1800, 2000)]


@pytest.mark.parametrize("setting", ["interval", "fraction"])
def test_no_evaluation_means_no_validation(tokens: Config, setting: str) -> None:
    if setting == "interval":
        tokens.train.eval_interval = 0
    else:
        tokens.data.validation_fraction = 0.0
    data = open_data(tokens, prepare(tokens))
    assert data.validation is None
    assert data.train.parts[0].tokens == (1800 if setting == "interval" else 2000)


def test_the_vocabulary_is_the_files_or_larger_never_smaller(tokens: Config) -> None:
    assert open_data(tokens, prepare(tokens)).train.vocab_size == 1000
    tokens.model.vocab_size = 1024
    assert open_data(tokens, prepare(tokens)).train.vocab_size == 1024
    tokens.model.vocab_size = 999
    with pytest.raises(UserError, match=r"model\.vocab_size=999: the tokenizer has 1,000 tokens"):
        open_data(tokens, prepare(tokens))


def test_foreign_token_files_need_a_vocabulary_size_or_a_tokenizer(tokens: Config, tmp_path: Path) -> None:
    (tmp_path / "a.json").unlink()
    with pytest.raises(UserError, match=r"model\.vocab_size"):
        open_data(tokens, prepare(tokens))
    tokens.model.vocab_size = 500
    assert open_data(tokens, prepare(tokens)).train.vocab_size == 500
    assert open_data(tokens, prepare(tokens)).tokenizer is None
    assert open_data(tokens, prepare(tokens)).bytes_of_ids is None
    tokens.model.vocab_size = None
    byte_tokenizer().save(tmp_path / "mine")
    tokens.tokenizer = str(tmp_path / "mine")
    data = open_data(tokens, prepare(tokens))
    assert (data.train.vocab_size, data.train.end_of_document) == (257, 256)
    assert data.bytes_of_ids is not None
    assert data.bytes_of_ids.tolist() == [1] * 256 + [0]


def test_parts_of_different_tokenizers_are_refused(tmp_path: Path, config: Config) -> None:
    for name, kind in (("a", "byte"), ("b", "char")):
        (tmp_path / f"{name}.txt").write_text("abc" * 300)
        config.tokenizer = kind
        prepare_file(Source("text", (str(tmp_path / f"{name}.txt"),)), config, tmp_path / name)
    config.data.source, config.data.path = "tokens", [str(tmp_path / "a"), str(tmp_path / "b")]
    with pytest.raises(UserError, match="b was made by another tokenizer than the parts before"):
        open_data(config, prepare(config))


def test_the_fingerprint_names_the_tokens_not_the_place_nor_how_they_are_cut(
    tokens: Config, write_tokens: WriteTokens, tmp_path: Path
) -> None:
    before = open_data(tokens, prepare(tokens)).fingerprint
    (tmp_path / "moved").mkdir()
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(tmp_path / f"a{suffix}", tmp_path / "moved" / f"b{suffix}")
    tokens.data.path = str(tmp_path / "moved" / "b")
    assert open_data(tokens, prepare(tokens)).fingerprint == before
    tokens.train.seq_length = 32
    assert open_data(tokens, prepare(tokens)).fingerprint == before
    tokens.data.validation_fraction = 0.2
    assert open_data(tokens, prepare(tokens)).fingerprint != before
    tokens.data.validation_fraction = 0.1
    tokens.data.path = str(write_tokens("c", [list(range(100))] * 19 + [list(range(1, 101))]))
    assert open_data(tokens, prepare(tokens)).fingerprint != before


def test_a_saved_tokenizer_decides_over_the_default(tokens: Config, tmp_path: Path) -> None:
    char_tokenizer(["abc"]).save(tmp_path / "a.tokenizer")
    with pytest.raises(UserError, match=r"a.bin.* token id \d+ at token .*outside the vocabulary of 3"):
        open_data(tokens, prepare(tokens))
    char_tokenizer([string.printable]).save(tmp_path / "a.tokenizer")
    assert open_data(tokens, prepare(tokens)).train.vocab_size == 100


@pytest.mark.parametrize("left", ["the folder", "the identity"])
def test_another_tokenizer_than_the_one_that_made_the_tokens_is_refused(
    tokens: Config, tmp_path: Path, left: str
) -> None:
    right = char_tokenizer([string.printable])
    if left == "the folder":
        right.save(tmp_path / "a.tokenizer")
    else:
        (tmp_path / "a.json").write_text(json.dumps({"tokenizer": right.identity}))
    for name, tokenizer in (("right", right), ("other", byte_tokenizer())):
        tokenizer.save(tmp_path / name)
    tokens.tokenizer = str(tmp_path / "right")
    assert open_data(tokens, prepare(tokens)).train.vocab_size == 100
    tokens.tokenizer = str(tmp_path / "other")
    with pytest.raises(UserError, match="a was made by another tokenizer than the one given"):
        open_data(tokens, prepare(tokens))


@pytest.mark.parametrize(("fraction", "evaluated"), [(0.9999999, True), (0.999, False), (1e-9, True)])
def test_what_is_advised_for_a_share_that_leaves_too_little_works(
    tokens: Config, fraction: float, evaluated: bool
) -> None:
    tokens.data.validation_fraction, tokens.train.eval_interval = fraction, 100 if evaluated else 0
    with pytest.raises(UserError) as refusal:
        open_data(tokens, prepare(tokens))
    (problem,) = refusal.value.problems
    advised = dict(re.findall(r"(data.validation_fraction|train.seq_length)=([\d.]+)", problem.hint))
    assert "data.validation_fraction" in advised
    assert advised["train.seq_length"] != "1"
    for name, value in advised.items():
        tokens = with_values(tokens, {name: float(value) if "fraction" in name else int(value)})
    open_data(tokens, prepare(tokens))


def test_a_large_token_file_of_another_time_is_told_once(
    tokens: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, told = [part.file for part in open_data(tokens, prepare(tokens)).train.parts], list[str]()
    note_changed_files(files, tmp_path, told.append)
    assert not (tmp_path / "token_files.json").exists(), "every byte of a small file is in the fingerprint"
    monkeypatch.setattr(open_module, "HASH_WHOLE", 1000)
    for record in ("[", "1", '[{"size": 4000, "mtime_ns": 5, "xxh3_128": "x"}]'):  # damaged; of an earlier version
        (tmp_path / "token_files.json").write_text(record)
        note_changed_files(files, tmp_path, told.append)
    note_changed_files(files, tmp_path, told.append)
    assert told == []
    os.utime(tmp_path / "a.bin", ns=(1, 1))
    for _ in range(2):
        note_changed_files(files, tmp_path, told.append)
    assert len(told) == 1
    assert f"--verify data=tokens data.path={tmp_path / 'a'} reads all" in told[0]

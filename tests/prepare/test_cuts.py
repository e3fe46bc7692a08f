"""A document of any length has the ids that `tokenizers` gives for the whole of it."""

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from megalite.data.tokenizers import TextTokenizer
from megalite.prepare import cuts
from megalite.prepare.cuts import cut_for, in_pieces
from megalite.prepare.tokenizing import encode_pieces

DRAW = random.Random(1)
VOCABULARY = ["if", "x", "1234567:", "don't", "word", "12", "(é)", "日本", "end.", "the", "quick", "A.", "é", "12345"]
GAPS = [" ", " ", " ", "\n", "\r\n", "\n\n  ", "  ", "\t", "."]
PROSE = "".join(chain.from_iterable((DRAW.choice(VOCABULARY), DRAW.choice(GAPS)) for _ in range(9000)))
REPLACED = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]


def trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    backend = Tokenizer(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    lines = PROSE[:9000].splitlines(keepends=True)
    backend.train_from_iterator(lines, trainer)
    return backend


def bpe(size: int = 200, **parts: Any) -> Tokenizer:
    special = ["<unk>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    return trained(models.BPE(unk_token="<unk>", fuse_unk=True), trainer, **parts)


def unigram(**parts: Any) -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    return trained(models.Unigram(), trainer, **parts)


def with_added(backend: Tokenizer) -> Tokenizer:
    backend.add_tokens([AddedToken("quick", lstrip=True, rstrip=True), AddedToken("x", single_word=True), "1\n2"])
    return backend


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
MAKE = {
    "Llama 2": lambda: bpe(normalizer=normalizers.Sequence(REPLACED)),
    "metaspace first": lambda: bpe(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")),
    "metaspace always": lambda: bpe(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    "byte-level, prefix": lambda: bpe(400, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "byte-level": lambda: bpe(400, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "added": lambda: with_added(bpe(400, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False))),
    "normalizer": lambda: bpe(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])),
    "across lines": lambda: bpe(pre_tokenizer=pre_tokenizers.Sequence([split(r"\w+\s+\w+"), LEVEL])),
    "of 500": lambda: bpe(pre_tokenizer=pre_tokenizers.Sequence([split(r"[\s\S]{1,500}"), LEVEL])),
    "unigram": lambda: unigram(pre_tokenizer=pre_tokenizers.Metaspace()),
    "unigram, whole": lambda: unigram(normalizer=normalizers.Sequence(REPLACED)),
    "word pieces": lambda: trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]"], show_progress=False),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    ),
}
WHOLE = ("of 500", "unigram, whole")  # for which there is no place, or none that is sure


def encoded(tokenizer: TextTokenizer, text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], int]:
    """The ids of a document as it is prepared, and in how many pieces that was."""
    monkeypatch.setattr(cuts, "WIDE", 600)
    monkeypatch.setattr(cuts, "PIECE", 5000)
    blocks = [text[at : at + 1700] for at in range(0, len(text), 1700)]
    parts = list(in_pieces(blocks, cut_for(tokenizer), 0))
    assert "".join(piece.text for piece in parts) == text
    return np.concatenate(encode_pieces(tokenizer, parts)).tolist(), len(parts)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("text", ["prose", "no line end", "no blank", "one letter", "signs"])
def test_a_long_document_has_the_ids_of_the_whole(kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {
        "prose": PROSE,
        "no line end": " ".join(PROSE.split()),
        "no blank": "".join(PROSE.split()),
        "one letter": "x" * 20_000,
        "signs": "\u6c49\u5b57\uff0c\u662f\u3002\n" * 4000,  # no line of it ends in a word
    }[text]
    backend = MAKE[kind]()
    expected = backend.encode(whole, add_special_tokens=False).ids
    found, parts = encoded(TextTokenizer(backend, {}), whole, monkeypatch)
    assert found == expected
    if text == "prose":
        assert (parts == 1) == (kind in WHOLE)
    assert parts > 1 or (text, kind) != ("signs", "byte-level")

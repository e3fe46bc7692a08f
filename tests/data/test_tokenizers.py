"""Tokenizers give back what they were given, equal their own saved form in transformers, and need no network."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megalite.data.tokenizers import END, TextTokenizer, _effect, byte_letters, byte_tokenizer, load_tokenizer
from megalite.errors.problems import UserError
from megalite.prepare.prepare import bpe_tokenizer, char_tokenizer, named_tokenizer

TEXT = 'def f(x):\n    return {"a": x + 1}  # 1 + 1 = 2\n\n\nprint(f(41))\té 日本\r\n' * 30
KINDS = ("byte", "char", "bpe")


def make(kind: str) -> TextTokenizer:
    if kind == "byte":
        return byte_tokenizer()
    return char_tokenizer([TEXT]) if kind == "char" else bpe_tokenizer([TEXT], 400)


@given(text=st.text())
def test_byte_gives_the_bytes(text: str) -> None:
    assert byte_tokenizer().encode(text) == list(text.encode())


def test_bytes_are_looked_up_where_the_model_says_the_same() -> None:
    spec, letters = byte_tokenizer().spec, {letter: id for id, letter in enumerate(reversed(byte_letters()))}
    added = spec["added_tokens"][0] | {"content": "é", "special": False}
    changes = [
        {"normalizer": {"type": "Lowercase"}},
        {"added_tokens": [added]},
        {"model": spec["model"] | {"vocab": letters}},
    ]
    for change in ({}, *changes):
        one = TextTokenizer(Tokenizer.from_str(json.dumps(spec | change)), {})
        assert one.encode("É, é!") == one.backend.encode("É, é!").ids
        assert one._gives_bytes == (not change)
    with pytest.raises(UserError, match="only the special token '!'"):
        TextTokenizer(Tokenizer.from_str(json.dumps(spec)), {"eos_token": "!"}).encode("é!")


def test_offsets_are_no_part_of_what_a_tokenizer_does() -> None:
    def effect(**changes: object) -> object:
        steps = {"type": "Sequence", "pretokenizers": [byte_tokenizer().spec["pre_tokenizer"] | changes]}
        return _effect(Tokenizer.from_str(json.dumps(spec(pre_tokenizer=steps))))

    assert effect() == effect(trim_offsets=False) != effect(use_regex=True)


def test_char_numbers_the_symbols_in_order() -> None:
    tokenizer = char_tokenizer([TEXT])
    assert tokenizer.vocab_size == len(set(TEXT))
    assert tokenizer.encode("".join(sorted(set(TEXT)))) == list(range(tokenizer.vocab_size))


def test_end_of_document_is_a_token_except_for_char() -> None:
    assert (byte_tokenizer().vocab_size, byte_tokenizer().end_of_document) == (257, 256)
    assert make("bpe").end_of_document == make("bpe").backend.token_to_id(END)
    assert char_tokenizer(["ab"]).end_of_document is None


def test_an_unknown_character_is_refused() -> None:
    with pytest.raises(UserError, match="cannot encode the text"):
        char_tokenizer(["ab"]).encode("abß")


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_folder_is_the_same_tokenizer_here_and_in_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = make(kind)
    tokenizer.save(tmp_path)
    assert '"PreTrainedTokenizerFast"' in (tmp_path / "tokenizer_config.json").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    again, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert again.identity == tokenizer.identity
    assert again.name.lower().startswith(f"{kind} tokenizer with "), again.name
    assert again.encode(TEXT) == theirs(TEXT, add_special_tokens=False).input_ids == tokenizer.encode(TEXT)
    assert theirs.decode(tokenizer.encode(TEXT)) == TEXT
    assert (len(theirs), theirs.eos_token_id) == (tokenizer.vocab_size, tokenizer.end_of_document)


def test_training_the_same_text_gives_the_same_bpe_in_any_process(tmp_path: Path) -> None:
    code = (
        "import sys; from megalite.prepare.prepare import bpe_tokenizer; "
        "print(bpe_tokenizer([sys.argv[1]] * 50 + ['x y ' + sys.argv[1]], 500).identity)"
    )
    made = {subprocess.check_output([sys.executable, "-c", code, TEXT]) for _ in range(2)}
    assert len(made) == 1


def test_a_folder_with_the_older_files_is_converted(tmp_path: Path) -> None:
    bpe_tokenizer([TEXT], 300).backend.model.save(str(tmp_path))  # vocab.json, merges.txt
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "eos_token_id": 0}')
    tokenizer = named_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("print(f(41))")) == "print(f(41))"


def folder_with(folder: Path, files: dict[str, object], tokenizer: TextTokenizer | None = None) -> str:
    """A tokenizer's folder of which some files hold other JSON."""
    (tokenizer or byte_tokenizer()).save(folder)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return str(folder)


def spec(**changes: object) -> dict[str, object]:
    return byte_tokenizer().spec | changes


EMPTY = {"type": "BPE", "vocab": {}, "merges": []}
NO_EOS = {"tokenizer_config.json": {}}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": {"eos_token": 7}}, "end of document, 7, is none of its tokens"),
        ({"tokenizer_config.json": {"eos_token": {"text": "x"}}}, "is none of its tokens"),
        (NO_EOS | {"config.json": {"eos_token_id": 65541}}, "65541, is none"),
        (NO_EOS | {"generation_config.json": {"eos_token_id": "x"}}, "'x', is none"),
        (NO_EOS | {"config.json": []}, r"config\.json: is not a JSON object"),
        ({"tokenizer_config.json": [1]}, r"tokenizer_config\.json: is not a JSON object"),
        ({"tokenizer.json": spec(model=EMPTY, added_tokens=[])}, "its vocabulary is empty"),
        ({"tokenizer.json": spec(model=EMPTY)}, "its vocabulary is empty"),  # special tokens alone encode nothing
        ({"tokenizer.json": "{"}, "cannot be read"),
        ({"tokenizer.json": {"model": 3}}, "cannot be read"),
        ({"tokenizer.json": None}, r"holds no tokenizer\.json"),
        ({"tokenizer.json": "pipe"}, "is not a regular file"),  # and not waited for
    ],
)
def test_a_tokenizer_that_cannot_be_trained_with_is_refused(
    files: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, {name: content for name, content in files.items() if content not in (None, "pipe")})
    for name, content in files.items():
        if content in (None, "pipe"):
            (tmp_path / name).unlink()
        if content == "pipe":
            os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=message):
        named_tokenizer(folder)


def test_a_tokenizer_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"is no folder here[\s\S]*use bpe, byte, char or a folder that exists"):
        named_tokenizer("./nowhere")


def test_the_end_of_document_of_the_models_files_counts_where_the_tokenizer_names_none(tmp_path: Path) -> None:
    files = NO_EOS | {"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": [9, 7]}}
    assert named_tokenizer(folder_with(tmp_path, files)).end_of_document == 9


def test_a_text_of_one_word_trains_a_bpe_in_seconds_and_shorter_words_train_the_same_one() -> None:
    draw = random.Random(1)
    word = "".join(draw.choices("abcdefgh", k=4_000))
    usual = Tokenizer(models.BPE())
    usual.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    texts = [TEXT, f"{word} {TEXT}", " " * 5000, "=" * 5000]
    usual.train_from_iterator(texts, trainer)
    assert bpe_tokenizer(texts, 400).spec["model"] == json.loads(usual.to_str())["model"]
    begin = time.monotonic()
    for letters in ("abcdefgh", "01234567", "=", " ", "+-*/_"):
        assert bpe_tokenizer(["".join(draw.choices(letters, k=1_000_000))], 300).vocab_size > 257
    assert time.monotonic() - begin < 30, "one of them takes minutes where its word is not cut"


MIXED = "Where the wild thyme blows, ünïcödé 漢字 and 🎉 grow;\n\tthe end of the thing.\n" * 3
PLAIN = "Where the wild thyme blows\nand oxlips grow"


def sentencepiece() -> TextTokenizer:
    """BPE with bytes for what it does not know, as Llama 2's: a space becomes ▁, and one stands before a text."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    named = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<unk>", "</s>", *named], show_progress=False)
    backend.train_from_iterator([PLAIN] * 9, trainer)
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in named]
    return TextTokenizer(Tokenizer.from_str(json.dumps(spec)), {"eos_token": "</s>"})


def word_pieces() -> TextTokenizer:
    """As BERT's."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator([PLAIN], trainer)
    return TextTokenizer(backend, {})


@pytest.mark.parametrize(
    ("tokenizer", "text", "spaces_put_before"),
    [
        (byte_tokenizer(), MIXED, 0),
        (char_tokenizer([MIXED]), MIXED, 0),
        (bpe_tokenizer([MIXED], 270), MIXED, 0),  # characters are cut between tokens
        (bpe_tokenizer([MIXED], 400), MIXED, 0),
        (sentencepiece(), MIXED, 1),
        (word_pieces(), PLAIN, 1),
    ],
)
def test_the_bytes_of_a_text_are_the_sum_over_its_ids(
    tokenizer: TextTokenizer, text: str, spaces_put_before: int
) -> None:
    ids = tokenizer.encode(text)
    assert len(set(ids)) > 7
    assert tokenizer.bytes_of_ids(tokenizer.vocab_size)[ids].sum() == len(text.encode()) + spaces_put_before


def test_what_is_no_text_has_no_bytes_and_added_words_have_theirs() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_tokens(["wörd"])
    sizes = tokenizer.bytes_of_ids(300)
    assert (sizes.shape, sizes.dtype) == ((300,), np.int64)
    assert sizes[tokenizer.backend.token_to_id(END)] == 0
    assert sizes[257] == len("wörd".encode())
    assert not sizes[258:].any()


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), bpe_tokenizer([MIXED], 270)])
def test_letters_that_stand_for_bytes_count_one_each_whatever_decodes_them(tokenizer: TextTokenizer) -> None:
    spec = tokenizer.spec | {"decoder": None}
    bare = TextTokenizer(Tokenizer.from_str(json.dumps(spec)), tokenizer.settings)
    assert np.array_equal(bare.bytes_of_ids(300), tokenizer.bytes_of_ids(300))

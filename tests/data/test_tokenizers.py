"""Tokenizers give back what they were given, equal their own saved form in transformers, and need no network."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.problems import UserError
from megalite.data.reading import cut
from megalite.data.tokenizers import (
    END,
    TextTokenizer,
    bpe_tokenizer,
    byte_tokenizer,
    char_tokenizer,
    load_tokenizer,
    named_tokenizer,
)

TEXT = 'def f(x):\n    return {"a": x + 1}  # 1 + 1 = 2\n\n\nprint(f(41))\té 日本\r\n' * 30
KINDS = ("byte", "char", "bpe")


def make(kind: str) -> TextTokenizer:
    if kind == "byte":
        return byte_tokenizer()
    return char_tokenizer([TEXT]) if kind == "char" else bpe_tokenizer([TEXT], 400)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_gives_back_the_text(kind: str) -> None:
    tokenizer = make(kind)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@given(text=st.text())
def test_byte_look_up_equals_the_model_that_is_saved(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text) == tokenizer.backend.encode(text).ids == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_char_look_up_equals_the_model_that_is_saved() -> None:
    tokenizer = char_tokenizer([TEXT])
    assert tokenizer.encode(TEXT) == tokenizer.backend.encode(TEXT).ids
    assert tokenizer.vocab_size == len(set(TEXT))
    assert tokenizer.encode("".join(sorted(set(TEXT)))) == list(range(tokenizer.vocab_size))


def test_end_of_document_is_a_token_except_for_char() -> None:
    assert (byte_tokenizer().vocab_size, byte_tokenizer().end_of_document) == (257, 256)
    assert make("bpe").end_of_document == make("bpe").backend.token_to_id(END)
    assert char_tokenizer(["ab"]).end_of_document is None


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_a_special_token_spelled_out_in_a_text_is_text(kind: str) -> None:
    tokenizer = make(kind)
    assert tokenizer.end_of_document not in tokenizer.encode(f"a{END}b")
    assert tokenizer.decode(tokenizer.encode(f"a{END}b")) == f"a{END}b"


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(UserError, match=r"holds 'ß' \(character 2\).*none of the tokenizer's 2 symbols"):
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
    assert again.encode(TEXT) == theirs(TEXT, add_special_tokens=False).input_ids == tokenizer.encode(TEXT)
    assert theirs.decode(tokenizer.encode(TEXT)) == TEXT
    assert (len(theirs), theirs.eos_token_id) == (tokenizer.vocab_size, tokenizer.end_of_document)


def test_training_the_same_text_gives_the_same_bpe_in_any_process(tmp_path: Path) -> None:
    code = (
        "import sys; from megalite.data.tokenizers import bpe_tokenizer; "
        "print(bpe_tokenizer([sys.argv[1]] * 50 + ['x y ' + sys.argv[1]], 500).identity)"
    )
    made = {subprocess.check_output([sys.executable, "-c", code, TEXT]) for _ in range(2)}
    assert len(made) == 1


LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("words", ["gpt2", "llama3"])
@pytest.mark.parametrize("gap", ["\n", "\r\n", "\n\n  ", " \n", "\n\t\n"])
def test_cutting_a_long_text_does_not_change_its_bpe_tokens(
    words: str, gap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Regex, pre_tokenizers

    from megalite.data import reading

    content = gap.join(["if x == 1234567:", "don't", "  word 12", "(é) 日本", "end."] * 20)
    tokenizer = bpe_tokenizer([content, TEXT], 400)
    if words == "llama3":
        split = pre_tokenizers.Split(Regex(LLAMA_WORDS), behavior="isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    monkeypatch.setattr(reading, "PIECE", 20)
    parts = cut(content)
    assert "".join(parts) == content
    assert len(parts) > 5 or gap == " \n"
    assert np.concatenate(tokenizer.encode_many(parts)).tolist() == tokenizer.encode(content)


def test_loading_a_saved_tokenizer_does_not_import_transformers(tmp_path: Path) -> None:
    make("bpe").save(tmp_path)
    code = (
        "import sys; from pathlib import Path; from megalite.data.tokenizers import load_tokenizer; "
        "load_tokenizer(Path(sys.argv[1])); sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_a_foreign_folder_brings_its_end_of_document(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    backend = bpe_tokenizer([TEXT], 300).backend
    backend.add_special_tokens(["</s>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = named_tokenizer(str(tmp_path))
    assert tokenizer.end_of_document == backend.token_to_id("</s>")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_a_folder_with_the_older_files_is_converted(tmp_path: Path) -> None:
    bpe_tokenizer([TEXT], 300).backend.model.save(str(tmp_path))  # vocab.json, merges.txt
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "eos_token_id": 0}')
    tokenizer = named_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("print(f(41))")) == "print(f(41))"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "there is no such folder"),
        ("/nowhere/at/all", "there is no such folder"),
        ("bype", "use bpe, byte, char or a folder that exists"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        named_tokenizer(name)


@pytest.mark.parametrize("content", ["{", '{"model": 3}'])
def test_a_broken_tokenizer_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="cannot be read"):
        named_tokenizer(str(tmp_path))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        named_tokenizer(str(tmp_path))

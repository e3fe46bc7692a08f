"""No special token arises from text, and a text that a tokenizer cannot encode is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megalite.data.tokenizers import END, TextTokenizer, byte_letters, byte_tokenizer, load_tokenizer
from megalite.errors.problems import UserError
from megalite.prepare.prepare import bpe_tokenizer

WORDS = {"</s>": 0, "[UNK]": 1, "the": 2, "model": 3, "##l": 4, "a": 5, "<": 6, "/": 7, "s": 8, ">": 9}
SPELLING = {"</s>": 0, "<": 1, "/": 2, "s": 3, ">": 4, "</": 5, "s>": 6, "a": 7, " ": 8, "\u24e2": 9}
ONLY_SPECIAL = "only the special token '</s>'"


def words(model: str, **parts: Any) -> Tokenizer:
    made = {
        "WordLevel": lambda: models.WordLevel(WORDS, unk_token="[UNK]"),
        "WordPiece": lambda: models.WordPiece(WORDS, unk_token="[UNK]"),
        "BPE": lambda: models.BPE(SPELLING, [("<", "/"), ("s", ">"), ("</", "s>")]),
        "Unigram": lambda: models.Unigram([(token, -float(at)) for at, token in enumerate(SPELLING)], 9, False),
        "end unknown": lambda: models.WordLevel(WORDS, unk_token="</s>"),
    }
    backend = Tokenizer(made[model]())
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


BLANKS = pre_tokenizers.WhitespaceSplit()


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (words("WordLevel", pre_tokenizer=BLANKS), "the </s> a"),
        (words("WordPiece", pre_tokenizer=BLANKS), "the </s> a"),
        (words("BPE"), "a</s>a"),
        (words("Unigram"), "a</s>a"),
        (words("BPE", normalizer=normalizers.Replace("&", "</s>")), "a&a"),
        (words("end unknown", pre_tokenizer=BLANKS), "the word a"),
    ],
)
@pytest.mark.parametrize(
    "added",
    [
        None,
        AddedToken("</s>", special=True),
        AddedToken("</s>", special=False, normalized=True),
        AddedToken("</s>", special=True, normalized=True, single_word=True),
    ],
)
def test_a_text_that_would_give_the_end_of_a_document_is_refused(
    backend: Tokenizer, text: str, added: AddedToken | None
) -> None:
    backend = Tokenizer.from_str(backend.to_str())
    if added is not None:
        backend.add_tokens([added])
    tokenizer = TextTokenizer(backend, {"eos_token": "</s>"})
    assert 0 not in tokenizer.encode("a")
    with pytest.raises(UserError, match=ONLY_SPECIAL):
        tokenizer.encode(text)


@pytest.mark.parametrize("kind", ["byte", "bpe", "added word"])
def test_a_special_token_spelled_out_in_a_text_is_text_where_letters_spell_it(kind: str) -> None:
    tokenizer = byte_tokenizer() if kind == "byte" else bpe_tokenizer(["a b c"], 300)
    if kind == "added word":
        tokenizer.backend.add_special_tokens(["<|tool|>"])
        tokenizer = TextTokenizer(tokenizer.backend, {"eos_token": "<|tool|>"})
    for text in (f"a{END}b", "a<|tool|>b"):
        assert max(tokenizer.encode(text)) <= 256
        assert tokenizer.end_of_document not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_unknown_symbol_has_the_token_for_it_also_where_that_is_special() -> None:
    backend = words("WordLevel", pre_tokenizer=BLANKS)
    backend.add_special_tokens(["[UNK]", "</s>"])
    assert TextTokenizer(backend, {"eos_token": "</s>"}).encode("the word a") == [2, 1, 5]


def test_a_sign_that_is_the_end_of_a_document_is_refused_in_a_text() -> None:
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(byte_letters())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = TextTokenizer(backend, {"eos_token": "!"})
    assert tokenizer.encode("it is") == [*b"it is"]
    with pytest.raises(UserError, match="only the special token '!'"):
        tokenizer.encode("it is !")


def test_an_end_that_the_normalizer_changes_keeps_the_name_in_the_file(tmp_path: Path) -> None:
    """Llama's normalizer puts a space before every text; the library tells the name of a normalized token with it."""
    backend = Tokenizer(models.BPE({**SPELLING, "\u2581": 10}, []))
    backend.normalizer = normalizers.Prepend("\u2581")
    backend.add_tokens([AddedToken("</s>", special=True, normalized=True)])
    assert backend.id_to_token(0) == "\u2581</s>"
    tokenizer = TextTokenizer(backend, {"eos_token": "</s>"})
    assert tokenizer.encode("a</s>") == [10, 7, 1, 2, 3, 4]
    tokenizer.save(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "</s>"
    assert load_tokenizer(tmp_path).identity == tokenizer.identity


def test_a_special_token_that_the_settings_alone_name_is_refused_in_a_text() -> None:
    tokenizer = TextTokenizer(words("BPE"), {"bos_token": {"content": "</s>"}, "pad_token": ["</s>"]})
    with pytest.raises(UserError, match=ONLY_SPECIAL):
        tokenizer.encode("a</s>a")


def test_a_token_that_pads_is_still_a_sign_in_a_text() -> None:
    backend = words("BPE")
    backend.add_special_tokens(["a"])
    assert TextTokenizer(backend, {"pad_token": "a", "eos_token": "</s>"}).encode("a<a") == [7, 1, 7]


def test_a_symbol_without_a_token_is_refused_where_the_library_drops_it() -> None:
    letters = [letter for letter in byte_letters() if letter != "e"]
    without_e = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    without_e.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    without_e.decoder = decoders.ByteLevel()
    assert without_e.encode("there").tokens == ["t", "h", "r"]
    whole = without_e.get_vocab() | {"e": 255}  # letters of all bytes, which do not cover a text of these two
    suffixed, unicode = Tokenizer(models.BPE(whole, [], end_of_word_suffix="</w>")), Tokenizer(models.BPE(whole, []))
    suffixed.pre_tokenizer, unicode.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    cases = [(without_e, "no such byt\u00fc", "the"), (words("BPE"), "a a", "aab")]
    cases += [(suffixed, "", "the"), (unicode, "the", "\u6f22")]
    for backend, known, unknown in cases:
        tokenizer = TextTokenizer(backend, {})
        assert len(tokenizer.encode(known)) == len(known.encode())
        with pytest.raises(UserError, match=r"cannot encode the text.*no token for a symbol"):
            tokenizer.encode(unknown)


def test_a_pattern_may_cut_a_special_token_out_of_a_text() -> None:
    backend = words("BPE", pre_tokenizer=pre_tokenizers.Split(Regex(r"[<>]"), "isolated"))
    assert TextTokenizer(backend, {"eos_token": "</s>"}).encode("a</s>") == [7, 1, 2, 3, 4]

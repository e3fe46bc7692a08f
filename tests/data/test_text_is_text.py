"""No special token arises from text, and what a tokenizer cannot say is refused with its place."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megalite.data.tokenizer_folder import load_tokenizer
from megalite.data.tokenizer_spec import byte_letters
from megalite.data.tokenizers import TextTokenizer, char_tokenizer
from megalite.errors.problems import UserError

SPELLED = ["the model</s>data train loss", "</s>", "<s>a</s></s> b <unk> <pad>", "a </s", "s></s>s> the </ss>"]
CORPUS = ["the model data train loss </ ss> s> a b <s unk> <pad </ ss> abs> ads> is> data</ train</x loss</ of</y"] * 40
WORDS = {"</s>": 0, "[UNK]": 1, "the": 2, "model": 3, "##l": 4, "a": 5, "<": 6, "/": 7, "s": 8, ">": 9}
SPELLING = {"</s>": 0, "<": 1, "/": 2, "s": 3, ">": 4, "</": 5, "s>": 6, "a": 7, " ": 8, "\u24e2": 9}


def sentencepiece_model(kind: str) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=90, model_type=kind, pad_id=3,
        normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False,
        split_by_unicode_script=False, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def converted(theirs: sentencepiece.SentencePieceProcessor, kind: str) -> TextTokenizer:
    """The same pieces as a model of `tokenizers`, which knows no control pieces."""
    pieces = [theirs.id_to_piece(number) for number in range(theirs.get_piece_size())]
    scored = [(piece, theirs.get_score(number)) for number, piece in enumerate(pieces)]
    model: Any = models.Unigram(scored, unk_id=0, byte_fallback=False)
    if kind == "bpe":
        ids = {piece: number for number, piece in enumerate(pieces)}
        cuts = [(piece[:at], piece[at:]) for piece in pieces for at in range(1, len(piece))]
        merges = sorted((pair for pair in cuts if set(pair) <= ids.keys()), key=lambda pair: ids["".join(pair)])
        model = models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>"])
    return TextTokenizer(backend, {"eos_token": "</s>"})


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_spelled_out_control_pieces_are_what_sentencepiece_makes_of_them(kind: str) -> None:
    theirs = sentencepiece_model(kind)
    ours = converted(theirs, kind)
    assert ours.end_of_document in ours.backend.encode(SPELLED[0]).ids, "the library's flag must not do"
    for text in (*SPELLED, CORPUS[0]):
        assert ours.encode(text) == theirs.encode(text), text
    assert [ids.tolist() for ids in ours.encode_many(SPELLED)] == theirs.encode(SPELLED)


def words(model: str, **parts: Any) -> Tokenizer:
    made = {
        "WordLevel": lambda: models.WordLevel(WORDS, unk_token="[UNK]"),
        "WordPiece": lambda: models.WordPiece(WORDS, unk_token="[UNK]"),
        "BPE": lambda: models.BPE(SPELLING, [("<", "/"), ("s", ">"), ("</", "s>")]),
        "whole words": lambda: models.BPE(SPELLING, [], ignore_merges=True),
    }
    backend = Tokenizer(made[model]())
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


BLANKS = pre_tokenizers.WhitespaceSplit()
SPLIT = pre_tokenizers.Split(Regex(r"\s"), "isolated")


@pytest.mark.parametrize(
    ("backend", "text", "ids"),
    [
        (words("WordLevel", pre_tokenizer=BLANKS), "the </s> a", [2, 1, 5]),
        (words("WordPiece", pre_tokenizer=BLANKS), "the </s> a", [2, 1, 5]),
        (words("BPE"), "a</s>a", [7, 5, 6, 7]),
        (words("whole words", pre_tokenizer=SPLIT), "a </s>", [7, 8, 1, 2, 3, 4]),
        (words("BPE", normalizer=normalizers.Lowercase()), "A</S>a", [7, 5, 6, 7]),
        (words("BPE", normalizer=normalizers.Replace("&", "</s>")), "a&a", [7, 5, 6, 7]),
        (words("BPE", normalizer=normalizers.NFKC()), "a\uff1c/s\uff1ea", [7, 5, 6, 7]),
    ],
)
@pytest.mark.parametrize(
    "added",
    [
        None,
        AddedToken("</s>", special=True),
        AddedToken("</s>", special=False, normalized=True),
        AddedToken("</s>", special=False, lstrip=True, rstrip=True),
        AddedToken("</s>", special=True, normalized=True, single_word=True),
    ],
)
def test_the_end_of_a_document_arises_from_no_text(
    backend: Tokenizer, text: str, ids: list[int], added: AddedToken | None
) -> None:
    backend = Tokenizer.from_str(backend.to_str())
    if added is not None:
        backend.add_tokens([added])
    tokenizer = TextTokenizer(backend, {"eos_token": "</s>"})
    assert 0 in tokenizer.backend.encode(text).ids or (added is not None and added.special)
    assert tokenizer.encode(text) == ids


def test_an_unknown_symbol_that_is_the_end_of_a_document_is_refused() -> None:
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="</s>"))
    backend.pre_tokenizer = BLANKS
    tokenizer = TextTokenizer(backend, {"eos_token": "</s>"})
    assert tokenizer.encode("the a") == [2, 5]
    with pytest.raises(UserError, match=r"only the special token '</s>' for 'word' \(character 4\)"):
        tokenizer.encode("the word a")


@pytest.mark.parametrize("use_regex", [True, False])
def test_a_sign_that_is_the_end_of_a_document_is_refused_in_a_text(use_regex: bool) -> None:
    """Without a regular expression the tokenizer is `byte`, whose ids are looked up in a table."""
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(byte_letters())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer = TextTokenizer(backend, {"eos_token": "!"})
    assert tokenizer.encode("it is") == [*b"it is"]
    with pytest.raises(UserError, match=r"(no token|only the special token '!') for '!' \(character 6\)"):
        tokenizer.encode("it is !")


def test_a_symbol_that_is_the_end_of_a_document_is_refused_in_a_text(tmp_path: Path) -> None:
    char_tokenizer(["ab\n"]).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "\n"}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.end_of_document, tokenizer.encode("ab")) == (0, [1, 2])
    with pytest.raises(UserError, match=r"no token for '\\n' \(character 1\)"):
        tokenizer.encode("a\nb")


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


def test_a_token_that_pads_is_still_a_sign_in_a_text() -> None:
    tokenizer = TextTokenizer(words("BPE"), {"pad_token": "a", "eos_token": "</s>"})
    assert tokenizer.encode("a<a") == [7, 1, 7]


def without_e(**parts: Any) -> Tokenizer:
    letters = [letter for letter in byte_letters() if letter != "e"]
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, [], **parts))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return backend


def test_a_byte_without_a_symbol_is_refused_with_its_place() -> None:
    tokenizer = TextTokenizer(without_e(), {})
    assert without_e().encode("there").tokens == ["t", "h", "r"], "the library drops it"
    assert tokenizer.decode(tokenizer.encode("no such byt\u00fc")) == "no such byt\u00fc"
    with pytest.raises(UserError, match=r"no token for 'e' \(character 8\)"):
        tokenizer.encode("It is the end")


def test_a_symbol_without_a_token_is_refused_where_there_is_no_unknown_one() -> None:
    backend = words("BPE")
    backend.add_special_tokens(["<pad>"])
    backend.add_tokens(["tool"])
    tokenizer = TextTokenizer(backend, {})
    assert tokenizer.encode("atool</s>") == backend.encode("atool</s>").ids == [7, 11, 0]
    with pytest.raises(UserError, match=r"no token for 'b' \(character 2\)"):
        tokenizer.encode("aabs>")


@pytest.mark.parametrize("wild", [10**12, 4_000_000_000, -1, 1.5, True])
@pytest.mark.parametrize("where", ["model", "added", "added_tokens.json", "tokenizer_config.json"])
def test_a_wild_id_is_refused_by_file_and_id(wild: object, where: str, tmp_path: Path) -> None:
    spec = json.loads(words("BPE").to_str())
    if where == "model":
        spec["model"]["vocab"]["</s>"] = wild
    elif where == "added":
        whole = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        spec["added_tokens"] = [{"id": wild, "content": "<x>"} | whole]
    elif where == "added_tokens.json":
        (tmp_path / where).write_text(json.dumps({"<x>": wild}))
    else:
        (tmp_path / where).write_text(json.dumps({"added_tokens_decoder": {str(wild): {"content": "<x>"}}}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    name = where if where.endswith(".json") else r"tokenizer\.json"
    with pytest.raises(UserError, match=rf"{name}: the id '?{wild}"):
        load_tokenizer(tmp_path)


def test_what_a_tokenizer_changes_in_a_page_is_told() -> None:
    lower = TextTokenizer(words("BPE", normalizer=normalizers.Lowercase(), decoder=decoders.Fuse()), {})
    assert lower.remarks("as < a") == []
    [told] = lower.remarks("as < A")
    assert "(character 5): 'as < A' becomes 'as < a'" in told
    backend = words("BPE", decoder=decoders.Fuse())
    backend.add_special_tokens(["</s>"])
    [told] = TextTokenizer(backend, {"eos_token": "</s>"}).remarks("as < a")
    assert told.endswith("to AutoTokenizer they are tokens: </s>")

"""Tokenizers from and to folders: ids are those of AutoTokenizer, whatever files and whatever model are beside."""

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from megalite.data.tokenizers import TextTokenizer, byte_tokenizer, load_tokenizer
from megalite.prepare.prepare import bpe_tokenizer, char_tokenizer

TEXT = "def f(x):\n    return 1234567 # the quick brown fox isn't here: naïve façade 漢字\r\n\n" * 20
PAGE = TEXT + "a<|tool|>b <|tool|> c <|end|>!" + "  \t x ABC 12 <|TOOL|>"
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
TOOL = {"content": "<|tool|>"} | FLAGS
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}

# --- folders of others -----------------------------------------------------------------------------------------------


def folder_of(folder: Path, files: dict[str, Any], digits: bool = False) -> Path:
    backend = Tokenizer.from_str(json.dumps(bpe_tokenizer([TEXT], 400).spec))
    if digits:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("digits", [False, True])
@pytest.mark.parametrize(
    ("settings", "others", "added"),
    [
        (FAST, {}, 0),
        (FAST, {"added_tokens.json": {"<|tool|>": 399}}, 1),
        (None, {"added_tokens.json": {"<|tool|>": 420, "<|end|>": 421}}, 2),  # a hole, which AutoTokenizer closes
        (FAST | {"added_tokens_decoder": {"399": TOOL}}, {}, 1),
        (FAST | {"added_tokens_decoder": {"399": TOOL | {"lstrip": True}}}, {}, 1),
        (FAST | {"pad_token": "[PAD]"}, {}, 1),
        ({"tokenizer_class": "GPT2Tokenizer"}, {}, 0),
        ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, {}, 0),
        ({"tokenizer_class": "Qwen2TokenizerFast"}, {}, 0),
        (FAST, {"config.json": {"model_type": "qwen2"}}, 0),
    ],
)
def test_ids_and_size_are_those_of_auto_tokenizer(
    settings: dict[str, Any] | None, others: dict[str, Any], added: int, digits: bool, tmp_path: Path
) -> None:
    files = others | ({"tokenizer_config.json": settings} if settings else {})
    theirs = transformers.AutoTokenizer.from_pretrained(folder_of(tmp_path, files, digits))
    ours = load_tokenizer(tmp_path)
    assert ours.encode(PAGE) == theirs(PAGE, add_special_tokens=False).input_ids
    assert ours.vocab_size == len(theirs) == bpe_tokenizer([TEXT], 400).vocab_size + added
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.identity, again.encode(PAGE)) == (ours.identity, ours.encode(PAGE))


def test_special_tokens_of_other_files_are_text_and_the_end_may_be_one(tmp_path: Path) -> None:
    settings = FAST | {"eos_token": "<|end|>", "additional_special_tokens": ["<|tool|>", "<|end|>"]}
    ours = load_tokenizer(folder_of(tmp_path, {"tokenizer_config.json": settings}))
    plain = bpe_tokenizer([TEXT], 400)
    assert ours.encode(PAGE) == plain.encode(PAGE)
    assert ours.vocab_size == plain.vocab_size + 2
    assert ours.end_of_document in (ours.vocab_size - 1, ours.vocab_size - 2)


def test_what_was_saved_here_is_read_without_transformers_also_where_its_pad_is_no_token(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer([TEXT], 400)
    tokenizer.settings["pad_token"] = "[PAD]"  # as an earlier megalite has saved folders of others
    tokenizer.save(tmp_path)
    code = (
        "import sys; from pathlib import Path; from megalite.data.tokenizers import load_tokenizer; "
        "print(load_tokenizer(Path(sys.argv[1])).vocab_size); "
        "sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True).stdout
    assert int(told) == tokenizer.vocab_size


# --- our own, exported -----------------------------------------------------------------------------------------------


def with_template() -> TextTokenizer:
    """One of others that puts a token before and one behind every text, as Llama's does."""
    backend = Tokenizer.from_str(json.dumps(bpe_tokenizer([TEXT], 300).spec))
    backend.add_special_tokens(["<s>", "</s>"])
    pieces = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    template = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=pieces)
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return TextTokenizer(backend, {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}})


def with_an_end_known_by_its_id() -> TextTokenizer:
    """A SentencePiece-like one whose folder names the end of a document in config.json alone."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁the", -1.0)]
    known = [(symbol, -3.0) for symbol in SYMBOLS if symbol != " "]
    backend = Tokenizer(models.Unigram([*pieces, *known], unk_id=0, byte_fallback=False))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return TextTokenizer(backend, {"unk_token": "<unk>"}, end_of_document=1)


SYMBOLS = sorted({*"The quick brown fox isn't over there; it jumps:\n\n\t  naïve façade, 漢字 and 😀! "})
MAKE = {
    "bpe": lambda: bpe_tokenizer([TEXT], 400),
    "byte": byte_tokenizer,
    "char": lambda: char_tokenizer(SYMBOLS),
    "template": with_template,
    "unigram": with_an_end_known_by_its_id,
}
ANY_TEXT = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(SYMBOLS)), max_size=60)
KNOWN_TEXT = st.text(st.sampled_from(SYMBOLS), max_size=60)


@lru_cache
def exported(kind: str, family: str, folder: Path) -> tuple[TextTokenizer, Any]:
    """A tokenizer and what AutoTokenizer reads from its export beside a model of the family."""
    ours, folder = MAKE[kind](), folder / f"{kind}-{family}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    for name, content in ours.files(context_length=10_000).items():
        (folder / name).write_bytes(content)
    return ours, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


EXPORTS = [("bpe", "gpt2"), ("bpe", "qwen3"), ("byte", "llama"), ("char", "llama"), ("template", "llama")]
EXPORTS += [("unigram", "gpt2")]


@pytest.mark.parametrize(("kind", "family"), EXPORTS)
def test_any_text_gives_the_ids_of_training(kind: str, family: str, place: Path) -> None:
    ours, theirs = exported(kind, family, place)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(text=KNOWN_TEXT if kind in ("char", "unigram") else ANY_TEXT)
    def same(text: str) -> None:
        tokens = theirs(text)["input_ids"]
        assert tokens == ours.encode(text)
        assert theirs.decode(tokens) == ours.decode(tokens)

    same()


@pytest.mark.parametrize(("kind", "family"), EXPORTS)
def test_a_text_begins_and_ends_with_the_end_of_a_document(kind: str, family: str, place: Path) -> None:
    ours, theirs = exported(kind, family, place)
    settings = json.loads(ours.files(64)["tokenizer_config.json"])
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast", "which transformers 4 knows"
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.end_of_document, ours.end_of_document)
    assert (kind == "char") == (ours.end_of_document is None)
    assert theirs.model_max_length == 10_000
    assert len(theirs) == ours.vocab_size  # nothing was added: the model has no row for it
    ours.save(place / f"{kind}-{family}-saved")
    assert load_tokenizer(place / f"{kind}-{family}-saved").end_of_document == ours.end_of_document

"""AutoTokenizer makes of an exported tokenizer what training made of it, whatever model it lies beside."""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from megalite.data.tokenizers import TextTokenizer, bpe_tokenizer, byte_tokenizer, char_tokenizer, load_tokenizer

TEXT = "The quick brown fox isn't over there; it jumps:\n\n\t  naïve façade, 漢字 and 😀! " * 5
SYMBOLS = sorted(set(TEXT))


def with_template() -> TextTokenizer:
    """One of others that puts a token before and one behind every text, as Llama's does."""
    backend = bpe_tokenizer([TEXT], 300).backend
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


MAKE: dict[str, Callable[[], TextTokenizer]] = {
    "bpe": lambda: bpe_tokenizer([TEXT], 400),
    "byte": byte_tokenizer,
    "char": lambda: char_tokenizer([TEXT]),
    "template": with_template,
    "unigram": with_an_end_known_by_its_id,
}
ANY_TEXT = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(SYMBOLS)), max_size=60)
KNOWN_TEXT = st.text(st.sampled_from(SYMBOLS), max_size=60)


@lru_cache
def exported(kind: str, family: str, folder: Path) -> tuple[TextTokenizer, Any]:
    """A tokenizer and what AutoTokenizer reads from its export beside a model of the family."""
    import transformers

    ours = MAKE[kind]()
    folder = folder / f"{kind}-{family}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    for name, content in ours.files(context_length=10_000).items():
        (folder / name).write_bytes(content)
    return ours, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("bpe", "gpt2"),
        ("bpe", "qwen3"),
        ("byte", "llama"),
        ("char", "llama"),
        ("template", "llama"),
        ("unigram", "gpt2"),
    ],
)
def test_any_text_gives_the_ids_of_training(kind: str, family: str, place: Path) -> None:
    ours, theirs = exported(kind, family, place)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(text=KNOWN_TEXT if kind in ("char", "unigram") else ANY_TEXT)
    def same(text: str) -> None:
        tokens = theirs(text)["input_ids"]
        assert tokens == ours.encode(text)
        assert theirs.decode(tokens) == ours.decode(tokens)

    same()


@pytest.mark.parametrize("kind", MAKE)
def test_a_text_begins_and_ends_with_the_end_of_a_document(kind: str, place: Path) -> None:
    ours, theirs = exported(kind, "gpt2" if kind == "unigram" else "llama", place)
    settings = json.loads(ours.files(64)["tokenizer_config.json"])
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast", "which transformers 4 knows"
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.end_of_document, ours.end_of_document)
    assert (kind == "char") == (ours.end_of_document is None)
    assert theirs.model_max_length == 10_000
    assert len(theirs) == ours.vocab_size  # nothing was added: the model has no row for it


def test_an_end_of_document_known_by_its_id_outlives_saving(tmp_path: Path) -> None:
    tokenizer = with_an_end_known_by_its_id()
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").end_of_document == tokenizer.end_of_document == 1

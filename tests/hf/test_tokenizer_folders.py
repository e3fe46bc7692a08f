"""A folder's tokenizer is what AutoTokenizer makes of it: ids of text and the size of the vocabulary."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from megalite.data.tokenizers import bpe_tokenizer, load_tokenizer

TEXT = "def f(x):\n    return 1234567 # the quick brown fox isn't here: naïve façade 漢字\r\n\n" * 20
PAGE = TEXT + "a<|tool|>b <|tool|> c <|end|>!" + "  \t x ABC 12 <|TOOL|>"
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
TOOL = {"content": "<|tool|>"} | FLAGS
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
QWEN = {"config.json": {"model_type": "qwen2"}}


def folder_of(folder: Path, files: dict[str, Any], digits: bool = False) -> Path:
    backend = bpe_tokenizer([TEXT], 400).backend
    if digits:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("digits", [False, True])
@pytest.mark.parametrize(
    ("files", "added"),
    [
        ({"tokenizer_config.json": FAST}, 0),
        ({"tokenizer_config.json": FAST, "added_tokens.json": {"<|tool|>": 399}}, 1),
        ({"added_tokens.json": {"<|tool|>": 420, "<|end|>": 421}}, 2),  # a hole, which AutoTokenizer closes
        ({"tokenizer_config.json": FAST | {"added_tokens_decoder": {"399": TOOL}}}, 1),
        ({"tokenizer_config.json": FAST | {"added_tokens_decoder": {"399": TOOL | {"lstrip": True}}}}, 1),
        ({"tokenizer_config.json": FAST | {"pad_token": "[PAD]"}}, 1),
        ({"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}}, 0),
        ({"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}}, 0),
        ({"tokenizer_config.json": {"tokenizer_class": "Qwen2TokenizerFast"}}, 0),
        ({"tokenizer_config.json": FAST} | QWEN, 0),
    ],
)
def test_ids_and_size_are_those_of_auto_tokenizer(
    files: dict[str, Any], added: int, digits: bool, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder_of(tmp_path, files, digits))
    ours = load_tokenizer(tmp_path)
    assert ours.encode(PAGE) == theirs(PAGE, add_special_tokens=False).input_ids
    assert ours.vocab_size == len(theirs)
    assert ours.vocab_size == bpe_tokenizer([TEXT], 400).vocab_size + added
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

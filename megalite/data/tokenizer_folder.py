"""Loads the tokenizer in a folder: AutoTokenizer is the specification.

AutoTokenizer reads all files of the folder: tokenizer.json and the tokens that other files add, or older files
(vocab.json and merges.txt, SentencePiece). A folder that `TextTokenizer.save` has written says the same by
tokenizer.json alone, and is read without transformers. No code from a folder is run.
"""

import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megalite.config.user_files import read_object, read_text, refusing
from megalite.data.tokenizers import KEPT_SETTINGS, TextTokenizer, token_text, written

AGAIN = "copy the tokenizer again, or give a folder with tokenizer.json that AutoTokenizer.from_pretrained loads"
SPECIAL, SETTINGS, ADDED = "special_tokens_map.json", "tokenizer_config.json", "added_tokens.json"
MODEL = ("generation_config.json", "config.json")


def load_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer in a folder of transformers' files. UserError for one that is damaged, or that nothing can be
    trained with: no vocabulary, an end of document that is no token."""
    names = (SPECIAL, SETTINGS, ADDED, *MODEL)
    files = {name: read_object(folder / name, AGAIN) for name in names if os.path.lexists(folder / name)}
    settings = files.get(SPECIAL, {}) | files.get(SETTINGS, {})
    with refusing(folder, AGAIN):
        plain = _plain(folder / "tokenizer.json")
        saved_here = plain and [*files] == [SETTINGS] and read_text(folder / SETTINGS, AGAIN) == written(settings)
        backend = plain if plain and saved_here else _specified(folder, plain)
        if not backend.get_vocab(with_added_tokens=False):
            raise ValueError("its vocabulary is empty")
        vocabulary = backend.get_vocab(with_added_tokens=True)
        eos, end, known = token_text(settings.get("eos_token")), None, list[Any](vocabulary)
        if eos is None:  # the model's files may know it
            ends = [files[name].get("eos_token_id") for name in MODEL if name in files]
            eos = next((each for each in ends if each not in (None, [])), None)
            eos = end = eos[0] if isinstance(eos, list) else eos
            known = list[Any](vocabulary.values())
        if eos is not None and eos not in known:
            raise ValueError(f"its end of document, {eos!r:.60}, is none of its tokens")
    return TextTokenizer(backend, {key: settings[key] for key in KEPT_SETTINGS if settings.get(key) is not None}, end)


def _plain(path: Path) -> Tokenizer | None:
    """The tokenizer that tokenizer.json says by itself; None without the file."""
    if not os.path.lexists(path):
        return None
    content = read_text(path, AGAIN)
    try:
        return Tokenizer.from_str(content)
    except Exception as error:
        raise ValueError(f"tokenizer.json cannot be read ({_first_line(error)})") from error


def _specified(folder: Path, plain: Tokenizer | None) -> Tokenizer:
    """The tokenizer that AutoTokenizer makes of a folder; `plain`, if it has the same effect, or if there is none."""
    try:
        from transformers import AutoTokenizer, logging

        logging.set_verbosity_error()
        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend: Tokenizer = theirs.backend_tokenizer
    except Exception as error:  # the library raises whatever it likes
        if plain is not None:
            return plain
        raise ValueError(f"holds no tokenizer.json that transformers can load ({_first_line(error)})") from error
    return plain if plain is not None and _effect(plain) == _effect(backend) else backend


def _effect(backend: Tokenizer) -> Any:
    """Everything on which the ids of a text depend, special tokens being text. Fields left empty and the places of
    tokens in the text are no part of it."""

    def said(part: Any) -> Any:
        if not isinstance(part, dict):
            return [*map(said, part)] if isinstance(part, list) and part and isinstance(part[0], dict) else part
        return {name: said(it) for name, it in part.items() if it not in (None, "") and name != "trim_offsets"}

    spec, known = json.loads(backend.to_str()), backend.get_vocab(with_added_tokens=False)
    added = [token for token in spec["added_tokens"] if not token["special"] or token["content"] not in known]
    return [said(spec[part]) for part in ("normalizer", "pre_tokenizer", "decoder", "model")], added


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")

"""Loads the tokenizer in a folder: AutoTokenizer is the specification.

AutoTokenizer reads all files of the folder: tokenizer.json and the tokens that other files add, or older files
(vocab.json and merges.txt, SentencePiece). A folder that `TextTokenizer.save` has written says the same by
tokenizer.json alone, and is read without transformers. No code from a folder is run.
"""

import json
import os
import re
from collections.abc import Mapping
from itertools import chain
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
    files = {name: read_object(folder / name, AGAIN) if os.path.lexists(folder / name) else {} for name in names}
    settings = files[SPECIAL] | files[SETTINGS]
    with refusing(folder, AGAIN):
        ids = settings.get("added_tokens_decoder") or {}
        _check_ids(SETTINGS, {it: int(it) if re.fullmatch(r"-?\d{1,20}", it) else it for it in ids})
        _check_ids(ADDED, files[ADDED])
        plain = _plain(folder / "tokenizer.json")
        if plain is not None and not plain.get_vocab(with_added_tokens=False):
            raise ValueError("its vocabulary is empty")
        kept = {key: settings[key] for key in KEPT_SETTINGS if settings.get(key) is not None}
        backend = plain if plain is not None and _is_ours(folder, settings) else _specified(folder, plain)
        vocabulary = (plain or backend).get_vocab(with_added_tokens=True)
        eos, end = token_text(settings.get("eos_token")), None
        known = [*vocabulary, *_named(settings), *files[ADDED]]  # not all of `backend`: it takes any eos_token in
        if eos is None:
            eos = end = _end_of_model(files)
            known = [*vocabulary.values()]
        if eos is not None and eos not in known:
            raise ValueError(f"its end of document, {eos!r:.60}, is none of its tokens")
    return TextTokenizer(backend, kept, end)


def _plain(path: Path) -> Tokenizer | None:
    """The tokenizer that tokenizer.json says by itself; None without the file."""
    if not os.path.lexists(path):
        return None
    content = read_text(path, AGAIN)
    try:
        said = json.loads(content)
        vocabulary = said["model"]["vocab"]
        added = {token["content"]: token["id"] for token in said["added_tokens"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        vocabulary, added = {}, {}  # the library says what is wrong
    _check_ids(path.name, (vocabulary if isinstance(vocabulary, dict) else {}) | added)
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


def _is_ours(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether the folder holds the files that `save` writes, in their form, and no other file about tokens."""
    if any(os.path.lexists(folder / name) for name in (SPECIAL, ADDED, *MODEL)):
        return False
    ours = {*KEPT_SETTINGS, "tokenizer_class", "model_max_length"} >= settings.keys() >= {*KEPT_SETTINGS[-1:]}
    return ours and read_text(folder / SETTINGS, AGAIN) == written(settings)


def _named(settings: dict[str, Any]) -> list[Any]:
    """The tokens that tokenizer_config.json adds to those of tokenizer.json."""
    lists = (settings.get(name) or () for name in ("additional_special_tokens", "extra_special_tokens"))
    return [*map(token_text, (*settings.get("added_tokens_decoder", {}).values(), *chain(*lists)))]


def _end_of_model(files: dict[str, dict[str, Any]]) -> Any:
    """The eos_token_id of the model's files, for a tokenizer that names no end of document."""
    found = next((eos for name in MODEL if (eos := files[name].get("eos_token_id")) is not None), None)
    return next(iter(found), None) if isinstance(found, list) else found


def _check_ids(name: str, ids: Mapping[str, Any]) -> None:
    """ValueError unless the `ids` of tokens that a file says are numbers near 0: libraries fill memory up to them."""
    bound = 8 * len(ids) + (1 << 20)
    for token, found in ids.items():
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < bound:
            raise ValueError(f"{name}: the id {found!r:.40} of {token!r:.40} is no number from 0 to {bound:,}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")

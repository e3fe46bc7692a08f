"""Reads the tokenizer in a folder of others: what tokenizer.json says, and what AutoTokenizer makes of all files."""

import json
import os
from pathlib import Path

from tokenizers import Tokenizer

from megalite.config.user_files import read_text
from megalite.data.tokenizer_spec import check_ids, same_effect

AGAIN = "copy the tokenizer again, or give a folder with tokenizer.json that AutoTokenizer.from_pretrained loads"


def plain_backend(path: Path) -> Tokenizer | None:
    """What tokenizer.json says by itself; None without the file."""
    if not os.path.lexists(path):
        return None
    content = read_text(path, AGAIN)
    try:
        said = json.loads(content)
        vocabulary = said["model"]["vocab"]
        added = {token["content"]: token["id"] for token in said["added_tokens"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        vocabulary, added = {}, {}  # the library says what is wrong
    ids = vocabulary if isinstance(vocabulary, dict) else {}
    check_ids(path.name, ids | added)
    try:
        return Tokenizer.from_str(content)
    except Exception as error:
        raise ValueError(f"tokenizer.json cannot be read ({(str(error).splitlines() or [''])[0]})") from error


def specified(folder: Path, plain: Tokenizer | None) -> Tokenizer:
    """What AutoTokenizer makes of a folder: of tokenizer.json and all that stands beside it, or of older files
    (vocab.json and merges.txt, SentencePiece). `plain`, if it has the same effect."""
    try:
        from transformers import AutoTokenizer, logging

        logging.set_verbosity_error()
        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend: Tokenizer = theirs.backend_tokenizer
    except Exception as error:  # the library raises whatever it likes
        if plain is not None:
            return plain
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"holds no tokenizer.json that transformers can load ({reason})") from error
    return backend if plain is None or not same_effect(plain, backend) else plain

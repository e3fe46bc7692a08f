"""What a prepared token file holds and how to train on it, as a few lines of text."""

import re
import shlex
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from megalite.data.token_file import TokenFile, with_suffix
from megalite.data.tokenizers import load_tokenizer

PLAIN = re.compile(r"(?!inf$|nan$)[a-z_./][\w./@+-]*", re.ASCII | re.IGNORECASE)  # special neither to Hydra nor a shell


def summary(prefix: Path) -> list[str]:
    """Lines for the token file PREFIX, which `prepare_file` made."""
    file = TokenFile.open(prefix)
    facts, tokenizer = file.sidecar(), load_tokenizer(with_suffix(prefix, ".tokenizer"))
    counts = f"{facts['documents']:,} documents, {facts['tokens']:,} tokens, {facts['bytes']:,} bytes"
    ratio = f"{facts['bytes'] / facts['tokens']:.3f} bytes per token"
    lines = [f"{prefix}: {counts}, {ratio}, vocabulary {facts['vocab_size']:,} ({facts['dtype']})"]
    if tokenizer.end_of_document is None:
        lines.append("the tokenizer has no end-of-document token: nothing marks where one document ends")
    else:
        lines.append(f"every document ends with token {tokenizer.end_of_document:,}")
    if facts["skipped_documents"]:
        lines.append(f"skipped {facts['skipped_documents']:,} rows without text")
    return [*lines, f"train on it: python pretrain_gpt.py data=tokens {path_override(str(prefix))}"]


def path_override(path: str) -> str:
    """`data.path=PATH` as it is typed in a shell; quoted where Hydra or the shell would read something else into it."""
    if PLAIN.fullmatch(path) and yaml.safe_load(path) == path:  # no number, no null
        return f"data.path={path}"
    escaped = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + ('\\"' if found[2] else ""), path)
    return shlex.quote(f'data.path="{escaped}"')

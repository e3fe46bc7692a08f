"""Scans a whole token file: every index entry and every token id, at the speed of the disk."""

from pathlib import Path

import numpy as np
import xxhash

from megalite.data.open import Progress
from megalite.data.token_file import TokenFile, broken_sequence, ids_of, with_suffix
from megalite.errors.problems import Problem, UserError

ROWS = 1 << 20  # index entries at once
TOKENS = 1 << 24  # tokens at once


def verify(prefix: Path, vocab_size: int | None, progress: Progress | None = None) -> TokenFile:
    """The file, if all of it is sound; else UserError naming the first broken sequence or document.
    Without `vocab_size`, that of PREFIX.json holds."""
    file = TokenFile.open(prefix)
    facts = file.facts()
    size = vocab_size if vocab_size is not None else facts.vocab_size
    if size is None:
        rule = "the vocabulary size is neither given nor in a file of ours"
        raise UserError(Problem("model.vocab_size", None, rule, "model.vocab_size=N"))
    problems = _index_problems(file) or _token_problems(file, int(size), progress)
    if not problems and facts.xxh3_128 not in (None, _hash(file)):
        rule = f"its content is not what was prepared (xxh3_128 differs from that in {prefix.name}.json)"
        problems = [Problem("data.path", str(with_suffix(prefix, ".bin")), rule, "copy it again, or prepare it again")]
    if problems:
        raise UserError(problems)
    return file


def _index_problems(file: TokenFile) -> list[Problem]:
    index = str(with_suffix(file.prefix, ".idx"))
    remedy = "copy both files again, or prepare the data again"
    for start in range(0, len(file.pointers), ROWS):
        if broken := broken_sequence(file, start, min(start + ROWS, len(file.pointers))):
            return [Problem("data.path", index, broken, remedy)]
    return []


def _token_problems(file: TokenFile, vocab_size: int, progress: Progress | None) -> list[Problem]:
    total, width, first, count = len(file.tokens), file.tokens.itemsize, -1, 0
    for start in range(0, total, TOKENS):
        piece = ids_of(file.tokens[start : start + TOKENS])
        wrong = np.flatnonzero((piece >= vocab_size) | (piece < 0))
        if len(wrong):
            first = start + int(wrong[0]) if first < 0 else first
            count += len(wrong)
        if progress:
            done = start + len(piece)
            progress(done * width, total * width, file.document_at(done - 1) + 1, done)
    if not count:
        return []
    rule = (
        f"token id {file.tokens[first]} in document {file.document_at(first):,} (token {first:,}) is outside the "
        f"vocabulary of {vocab_size:,}; {count:,} such tokens in all"
    )
    remedy = "give the vocabulary size of the tokenizer that made the file, or prepare the data again"
    return [Problem("data.path", str(with_suffix(file.prefix, ".bin")), rule, remedy)]


def _hash(file: TokenFile) -> str:
    state = xxhash.xxh3_128()
    for start in range(0, len(file.tokens), TOKENS):
        state.update(file.tokens[start : start + TOKENS].tobytes())
    return state.hexdigest()

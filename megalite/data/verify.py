"""Scans a whole token file: every index entry and every token id, at the speed of the disk."""

from pathlib import Path

import xxhash

from megalite.data.open import Progress
from megalite.data.token_file import TokenFile, broken_sequence, places_beyond, with_suffix
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
    count = len(file.pointers)
    for start in range(0, count, ROWS):
        if broken := broken_sequence(file, start, min(start + ROWS, count)):
            index, remedy = with_suffix(prefix, ".idx"), "copy both files again, or prepare the data again"
            raise UserError(Problem("data.path", str(index), broken, remedy))
    total, width, state = len(file.tokens), file.tokens.itemsize, xxhash.xxh3_128()
    first, beyond = -1, 0
    for start in range(0, total, TOKENS):
        tokens = file.tokens[start : start + TOKENS]
        state.update(tokens.data)
        places = places_beyond(tokens, size)
        first = start + int(places[0]) if len(places) and not beyond else first
        beyond += len(places)
        if progress:
            done = start + len(tokens)
            progress(done * width, total * width, file.document_at(done - 1) + 1, done)
    rule, remedy = "", "copy it again, or prepare it again"
    if beyond:
        at = f"{file.tokens[first]} in document {file.document_at(first):,} (token {first:,})"
        rule = f"token id {at} is outside the vocabulary of {size:,}; {beyond:,} such tokens in all"
        remedy = "give the vocabulary size of the tokenizer that made the file, or prepare the data again"
    elif facts.xxh3_128 not in (None, state.hexdigest()):
        rule = f"its content is not what was prepared (xxh3_128 differs from that in {prefix.name}.json)"
    if rule:
        raise UserError(Problem("data.path", str(with_suffix(prefix, ".bin")), rule, remedy))
    return file

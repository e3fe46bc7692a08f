"""Tokenizes shards into token files in several worker processes, joins and verifies token files.

Workers are fresh processes, not forks: a fork copies the locks of threads that it does not copy, and libraries here run
threads. The index of a token file comes last, after everything else is on disk, and a reader refuses data without its
index: a write that was torn at any instant is invisible. Memory holds some 30 bytes for each document of the file.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megalite.config.files import write_atomically
from megalite.data.open import Progress
from megalite.data.samples import IntArray
from megalite.data.token_file import CODES, HEADER, MAGIC, TokenFile, damaged, dtype_for, with_suffix
from megalite.data.tokenizers import TextTokenizer, load_tokenizer
from megalite.errors.problems import Problem, UserError
from megalite.prepare.cuts import PIECE, Piece, cut_for
from megalite.prepare.sources import Shard, pieces

LONGEST = 2**31 - 1  # tokens in one sequence: its length is an i32
COPY = 8 << 20  # tokens that are copied or scanned at once
OF_A_PIECE = 256  # characters that a piece counts for by itself: many short ones take memory, too

Job = tuple[Path, Shard]  # the token file to write, and the text that it is made of
Counts = tuple[Path, int, int, int]  # a token file, and its bytes of text, documents and tokens so far

tokenizer_of_worker = cache(load_tokenizer)


def tokenize_shards(jobs: list[Job], tokenizer: TextTokenizer, folder: Path, workers: int) -> Iterator[Counts]:
    """Do all `jobs`; what is done so far. `folder` holds the tokenizer for the workers."""
    if len(jobs) <= 1 or workers <= 1:
        for job in jobs:
            yield from tokenize_shard(job, tokenizer, 2 * PIECE)  # one process has all cores
        return
    context, others = multiprocessing.get_context("spawn"), multiprocessing.active_children()
    team = ProcessPoolExecutor(min(workers, len(jobs)), context, _begin)
    main = sys.modules["__main__"]
    try:
        sys.modules["__main__"] = ModuleType("__main__")  # workers do not run the user's script, which may prepare, too
        for done in as_completed([team.submit(_work, job, folder) for job in jobs]):
            yield done.result()
    except BrokenProcessPool as error:
        raise RuntimeError("a tokenizing process was ended (out of memory?)") from error
    finally:
        sys.modules["__main__"] = main
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()
        team.shutdown(cancel_futures=True)


def _begin() -> None:
    """Start a worker of one thread, which ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the parent decides
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(job: Job, folder: Path) -> Counts:
    *_, last = tokenize_shard(job, tokenizer_of_worker(folder), PIECE)
    return last


def tokenize_shard(job: Job, tokenizer: TextTokenizer, batch: int) -> Iterator[Counts]:
    """Write the token file of one shard, `batch` characters at a time; the counts after each."""
    target, shard = job
    end = np.array([] if tokenizer.end_of_document is None else [tokenizer.end_of_document], dtype=np.int64)
    size = skipped = 0  # bytes of text, in UTF-8; rows without text
    writer = TokenWriter(target, dtype_for(tokenizer.vocab_size))
    for gathered in _batches(pieces(shard, cut_for(tokenizer)), batch):
        found = [piece for piece in gathered if piece.text]
        skipped += len(gathered) - len(found)
        for piece, ids in zip(found, _encoded(found, tokenizer, shard), strict=True):
            size += len(piece.text.encode())
            writer.add(ids)
            if piece.last:
                writer.add(end)
                writer.end_document()
        yield target, size, writer.documents, writer.tokens
    counts = {"bytes": size, "documents": writer.documents, "tokens": writer.tokens, "skipped_documents": skipped}
    writer.finish(counts)
    yield target, max(size, shard.size), writer.documents, writer.tokens  # what is not text is done with, too


def _batches(found: Iterable[Piece], characters: int) -> Iterator[list[Piece]]:
    """The pieces, gathered until they have this many characters."""
    gathered, held = list[Piece](), 0
    for piece in found:
        gathered.append(piece)
        held += OF_A_PIECE + len(piece.text)
        if held >= characters:
            yield gathered
            gathered, held = [], 0
    yield gathered


def _encoded(found: list[Piece], tokenizer: TextTokenizer, shard: Shard) -> list[IntArray]:
    """The ids of the pieces; UserError with the place of the first that the tokenizer refuses."""
    try:
        return encode_pieces(tokenizer, found)
    except UserError:
        for piece in found:
            try:
                encode_pieces(tokenizer, [piece])
            except UserError as error:
                path = shard.paths[piece.document if shard.kind == "text" else 0]
                part = f" from {shard.start:,} on" if shard.start else ""
                place = f"{path}: document {piece.document + 1:,}{part}"
                raise UserError([replace(it, rule=f"{it.rule}, in {place}") for it in error.problems]) from error
        raise


def encode_pieces(tokenizer: TextTokenizer, found: list[Piece]) -> list[IntArray]:
    """The ids of each piece, without those of the text before it."""
    encoded = tokenizer.encode_many([piece.before + piece.text for piece in found])
    for number, before in ((number, piece.before) for number, piece in enumerate(found) if piece.before):
        [head] = tokenizer.encode_many([before])
        if not np.array_equal(encoded[number][: len(head)], head):
            raise tokenizer.refusal("encodes a part of a long document otherwise than the whole")
        encoded[number] = encoded[number][len(head) :]
    return encoded


class TokenWriter:
    """Writes a new PREFIX.bin and PREFIX.idx: `add` tokens, `end_document`, and at the end `finish`."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any], longest: int = LONGEST) -> None:
        self.prefix, self.dtype, self.longest = prefix, dtype, longest
        self.tokens = 0
        self._open = 0  # tokens of the document that is being written
        self._lengths, self._boundaries = array("i"), array("q", [0])
        with_suffix(prefix, ".idx").unlink(missing_ok=True)
        self._data = with_suffix(prefix, ".bin").open("wb")
        self.hash = xxhash.xxh3_128()

    @property
    def documents(self) -> int:
        return len(self._boundaries) - 1

    def add(self, tokens: npt.NDArray[Any]) -> None:
        """Append tokens [n] to the open document."""
        if np.any(tokens > np.iinfo(self.dtype).max):  # no assert: python -O would cut the ids
            raise ValueError(f"{self.prefix.name}: token id {tokens.max()} does not fit {self.dtype}")
        self._write(tokens.astype(self.dtype, copy=False))
        self._open += len(tokens)

    def end_document(self) -> None:
        """Close the open document."""
        while self._open > self.longest:
            self._lengths.append(self.longest)
            self._open -= self.longest
        self._lengths.append(self._open)
        self._boundaries.append(len(self._lengths))
        self._open = 0

    def append(self, file: TokenFile) -> None:
        """All documents of a file of the same dtype."""
        assert file.tokens.dtype == self.dtype, (file.tokens.dtype, self.dtype)
        for start in range(0, len(file.tokens), COPY):
            self._write(file.tokens[start : start + COPY])
        self._boundaries.frombytes((file.boundaries[1:] + len(self._lengths)).tobytes())
        self._lengths.frombytes(file.lengths[:].tobytes())

    def finish(self, facts: dict[str, Any]) -> None:
        """Make the file visible, with `facts` in PREFIX.json."""
        assert self._open == 0, "finish inside a document"
        lengths, pointers = np.array(self._lengths, dtype="<i4"), np.zeros(len(self._lengths), dtype="<i8")
        np.cumsum(lengths[:-1].astype(np.int64) * self.dtype.itemsize, out=pointers[1:])
        header = HEADER.pack(MAGIC, 1, CODES[self.dtype], len(lengths), len(self._boundaries))
        with self._data:
            self._data.flush()
            os.fsync(self._data.fileno())
        write_atomically(with_suffix(self.prefix, ".json"), json.dumps(facts, indent=1).encode())
        parts = (lengths, pointers, np.array(self._boundaries, dtype="<i8"))
        write_atomically(with_suffix(self.prefix, ".idx"), b"".join([header, *(part.tobytes() for part in parts)]))

    def _write(self, tokens: npt.NDArray[Any]) -> None:
        self.hash.update(tokens.data)
        self._data.write(tokens.data)
        self.tokens += len(tokens)


def join(files: Iterable[TokenFile], prefix: Path, dtype: np.dtype[Any], facts: dict[str, Any]) -> None:
    """PREFIX holds the documents of all `files` (of this dtype) in order; `facts` and a hash go to PREFIX.json. `files`
    may open each file when it is asked for: none is kept."""
    writer = TokenWriter(prefix, dtype)
    for file in files:
        writer.append(file)
    writer.finish(facts | {"xxh3_128": writer.hash.hexdigest()})


def verify(prefix: Path, vocab_size: int | None, progress: Progress | None = None) -> TokenFile:
    """The file, if every index entry and every token id of it is sound; else UserError naming the first broken sequence
    or document. Without `vocab_size`, that of PREFIX.json holds. `progress`: see open.py."""
    file = TokenFile.open(prefix)
    size = vocab_size if vocab_size is not None else file.facts.vocab_size
    if size is None:
        rule = "the vocabulary size is neither given nor in a file of ours"
        raise UserError(Problem("model.vocab_size", None, rule, "model.vocab_size=N"))
    file.check(file.tokens.nbytes)
    total, width, state = len(file.tokens), file.tokens.dtype.itemsize, xxhash.xxh3_128()
    for start in range(0, total, COPY):
        stop = min(start + COPY, total)
        state.update(file.tokens[start:stop].data)
        file.check_range(start, stop, size)
        if progress:
            progress(stop * width, total * width, file.document_at(stop - 1) + 1, stop)
    if file.facts.xxh3_128 not in (None, state.hexdigest()):
        raise damaged(prefix, ".bin", f"its content is not what was prepared (by its hash in {prefix.name}.json)")
    return file

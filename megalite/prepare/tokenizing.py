"""Tokenizes shards into token files in several worker processes, and verifies token files.

Workers are fresh processes, not forks: a fork copies the locks of threads that it does not copy, and libraries here run
threads. The index of a token file comes last, after everything else is on disk, and a reader refuses data without its
index: a write that was torn at any instant is invisible. Memory holds some 60 bytes for each document of the file.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import xxhash

from megalite.config.files import sync_folder, write_atomically
from megalite.data.samples import IntArray
from megalite.data.token_file import CODES, ENTRIES, HEADER, MAGIC, TokenFile, damaged, with_suffix
from megalite.data.tokenizers import TextTokenizer, load_tokenizer
from megalite.errors.problems import Problem, UserError
from megalite.prepare.cuts import PIECE, Piece, cut_for
from megalite.prepare.sources import Shard, pieces

LONGEST = 2**31 - 1  # tokens in one sequence: its length is an i32
SCANNED = 8 << 20  # tokens that are scanned at once
OF_A_PIECE = 256  # characters that a piece counts for by itself: many short ones take memory, too

Job = tuple[Path, Shard]  # the token file to write, and the text that it is made of
# Bytes done, all bytes (0 where a stream's are unknown), documents, tokens. The first call counts finished shards.
Progress = Callable[[int, int, int, int], None]
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
        try:
            tasks = [team.submit(_work, job, folder) for job in jobs]
        except OSError as error:  # without a number: a worker that ended has closed what the next one starts with
            raise (error if error.errno else BrokenProcessPool()) from None
        for done in as_completed(tasks):
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
    (target, shard), dtype = job, dtype_for(tokenizer.vocab_size)
    end = np.array([] if tokenizer.end_of_document is None else [tokenizer.end_of_document], dtype=np.int64)
    size = skipped = 0  # bytes of text, in UTF-8; rows without text
    tokens = begun = 0  # of all documents; of the one that is being written
    lengths = array("q")  # tokens of each document
    with_suffix(target, ".idx").unlink(missing_ok=True)  # it would describe other data
    with with_suffix(target, ".bin").open("wb") as file:
        for gathered in _batches(pieces(shard, cut_for(tokenizer)), batch):
            found = [piece for piece in gathered if piece.text]
            skipped += len(gathered) - len(found)
            for piece, ids in zip(found, _encoded(found, tokenizer, shard), strict=True):
                stored = (np.append(ids, end) if piece.last else ids).astype(dtype)
                file.write(stored.data)
                size, tokens, begun = size + len(piece.text.encode()), tokens + len(stored), begun + len(stored)
                if piece.last:
                    lengths.append(begun)
                    begun = 0
            yield target, size, len(lengths), tokens
    counts = {"bytes": size, "documents": len(lengths), "tokens": tokens, "skipped_documents": skipped}
    write_index(target, dtype, np.array(lengths, np.int64), counts)
    yield target, max(size, shard.size), len(lengths), tokens  # what is not text is done with, too


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
    except UserError as error:
        if len(found) > 1:
            return [ids for piece in found for ids in _encoded([piece], tokenizer, shard)]
        path = shard.paths[found[0].document if shard.kind == "text" else 0]
        part = f" from {shard.start:,} on" if shard.start else ""
        place = f"{path}: document {found[0].document + 1:,}{part}"
        raise UserError([replace(it, rule=f"{it.rule}, in {place}") for it in error.problems]) from error


def encode_pieces(tokenizer: TextTokenizer, found: list[Piece]) -> list[IntArray]:
    """The ids of each piece, without those of the text before it."""
    encoded = tokenizer.encode_many([piece.before + piece.text for piece in found])
    for number, before in ((number, piece.before) for number, piece in enumerate(found) if piece.before):
        [head] = tokenizer.encode_many([before])
        if not np.array_equal(encoded[number][: len(head)], head):
            raise tokenizer.refusal("encodes a part of a long document otherwise than the whole")
        encoded[number] = encoded[number][len(head) :]
    return encoded


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Megatron's choice: 16 bits where every id fits with room to spare."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def write_index(
    prefix: Path, dtype: np.dtype[Any], documents: IntArray, facts: dict[str, Any], longest: int = LONGEST
) -> None:
    """Make PREFIX.bin, of `documents` [documents] tokens each, visible: `facts` go to PREFIX.json, the index comes
    last."""
    counts = np.maximum(1, -(-documents // longest))  # sequences of each document
    boundaries = np.append(0, np.cumsum(counts))
    lengths = np.full(boundaries[-1], longest)
    lengths[boundaries[1:] - 1] = documents - (counts - 1) * longest
    pointers = (np.cumsum(lengths) - lengths) * dtype.itemsize
    head = HEADER.pack(MAGIC, 1, CODES[dtype], len(lengths), len(boundaries))
    parts = [part.astype(kind).tobytes() for part, kind in zip((lengths, pointers, boundaries), ENTRIES, strict=True)]
    sync_folder(with_suffix(prefix, ".bin"))
    write_atomically(with_suffix(prefix, ".json"), json.dumps(facts, indent=1).encode())
    write_atomically(with_suffix(prefix, ".idx"), b"".join([head, *parts]))


def verify(prefix: Path, vocab_size: int | None, progress: Progress | None = None) -> TokenFile:
    """The file, if every index entry and every token id of it is sound; else UserError naming the first broken sequence
    or document. Without `vocab_size`, that of PREFIX.json holds. `progress` is told."""
    file = TokenFile.open(prefix)
    size = vocab_size if vocab_size is not None else file.facts.vocab_size
    if size is None:
        rule = "the vocabulary size is neither given nor in a file of ours"
        raise UserError(Problem("model.vocab_size", None, rule, "model.vocab_size=N"))
    file.check(file.tokens.nbytes)
    total, width, state = len(file.tokens), file.tokens.dtype.itemsize, xxhash.xxh3_128()
    for start in range(0, total, SCANNED):
        stop = min(start + SCANNED, total)
        state.update(file.tokens[start:stop].data)
        file.check_range(start, stop, size)
        if progress:
            progress(stop * width, total * width, file.document_at(stop - 1) + 1, stop)
    if file.facts.xxh3_128 not in (None, state.hexdigest()):
        raise damaged(prefix, ".bin", f"its content is not what was prepared (by its hash in {prefix.name}.json)")
    return file

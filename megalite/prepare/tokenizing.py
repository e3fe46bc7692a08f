"""Tokenizes shards into token files, each visible only when it is whole, in several worker processes.

Workers are fresh processes, not forks: a fork copies the locks of threads that it does not copy, and libraries here run
threads. A worker whose parent is gone ends. The first shard that fails stops the rest; shards that are done stay done.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from types import ModuleType

import numpy as np

from megalite.data.token_file import dtype_for
from megalite.data.tokenizer_folder import load_tokenizer
from megalite.data.tokenizers import TextTokenizer
from megalite.prepare.reading import FAR, PIECE, Cut, Shard, line_end, pieces
from megalite.prepare.token_writer import TokenWriter

NEAR = (256, 251, 243)  # characters around a cut in which it must not matter, as for FAR
TRIED = 32  # places for a cut
OF_A_PIECE = 256  # characters that a piece counts for by itself: many short ones take memory, too
OF_A_WORKER = {  # one thread each; and a module of the current folder is not imported
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONSAFEPATH": "1",
}

Job = tuple[Path, Shard]  # the token file to write, and the text that it is made of
Counts = tuple[Path, int, int, int]  # a token file, and its bytes of text, documents and tokens


def tokenize_shards(
    jobs: list[Job], tokenizer: TextTokenizer, folder: Path, workers: int, count: Callable[..., None]
) -> None:
    """Do all `jobs`; `folder` holds the tokenizer for the workers. `count` is told the counts of what is done."""
    if len(jobs) <= 1 or workers <= 1:
        for job in jobs:  # one process has all cores
            count(*tokenize_shard(job, tokenizer, 4 * PIECE, count))
        return
    others = {*active_children()}
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn"), _end_with_the_parent) as pool:
        try:
            with _for_workers():
                done = [pool.submit(_work, job, folder) for job in jobs]
            for future in as_completed(done):
                count(*future.result())
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in {*active_children()} - others:
                worker.kill()
            if isinstance(error, BrokenProcessPool):
                raise RuntimeError("a tokenizing process was ended (out of memory?)") from error
            raise


@contextmanager
def _for_workers() -> Iterator[None]:
    """Processes that are started inside do not run the user's script, which may prepare, too."""
    main, before = sys.modules["__main__"], dict(os.environ)
    try:
        os.environ.update(OF_A_WORKER)
        sys.modules["__main__"] = ModuleType("__main__")
        yield
    finally:
        sys.modules["__main__"] = main
        for name in OF_A_WORKER:
            os.environ.pop(name)
        os.environ.update(before)


def _end_with_the_parent() -> None:
    """Have this worker end when its parent has."""

    def watch() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    Thread(target=watch, daemon=True).start()


_tokenizer = cache(load_tokenizer)


def _work(job: Job, folder: Path) -> Counts:
    """One shard, in a worker."""
    return tokenize_shard(job, _tokenizer(folder), PIECE, lambda *_: None)


def tokenize_shard(job: Job, tokenizer: TextTokenizer, batch: int, count: Callable[..., None]) -> Counts:
    """Write the token file of one shard, `batch` characters at a time."""
    target, shard = job
    end = np.array([] if tokenizer.end_of_document is None else [tokenizer.end_of_document], dtype=np.int64)
    size, skipped, begun = 0, 0, False  # bytes of text, in UTF-8; rows without text; whether a document has some
    with TokenWriter(target, dtype_for(tokenizer.vocab_size)) as writer:
        for gathered in _batches(pieces(shard, cut_for(tokenizer)), batch):
            texts = [piece for piece in gathered if piece is not None]
            place = partial(_place, shard, gathered, writer.documents + skipped)
            encoded = iter(tokenizer.encode_many(texts, place))
            for piece in gathered:
                if piece is not None:
                    size, begun = size + (len(piece) if piece.isascii() else len(piece.encode())), True
                    writer.add(next(encoded))
                elif begun:
                    writer.add(end)
                    writer.end_document()
                    begun = False
                else:
                    skipped += 1
            count(target, size, writer.documents, writer.tokens)
        found = {"bytes": size, "documents": writer.documents, "tokens": writer.tokens, "skipped_documents": skipped}
        writer.finish(found)
    return target, max(size, shard.size), writer.documents, writer.tokens  # what is not text is done with, too


def cut_for(tokenizer: TextTokenizer) -> Cut:
    """Where a long document may be cut into pieces which, encoded one by one, have the ids of the whole: in front of a
    line end, and only where that does not matter, whatever of the text around it is read. A text without such a place
    stays whole."""

    def cut(text: str, start: int) -> int:
        # A Unigram model adds up scores over all of a word: rounding decides ties in a long one.
        for _ in range(TRIED if tokenizer.spec["model"]["type"] != "Unigram" else 0):
            start = line_end(text, start)
            if not FAR <= start <= len(text) - FAR:
                return 0
            spans = [(start - left, start + right) for left in (FAR, *NEAR) for right in (FAR, *NEAR)]
            heads = tokenizer.encode_many([text[first:start] for first, _ in spans])
            tails = tokenizer.encode_many([text[start:stop] for _, stop in spans])
            wholes = tokenizer.encode_many([text[first:stop] for first, stop in spans])
            if all(np.array_equal(np.append(*parts), ids) for *parts, ids in zip(heads, tails, wholes, strict=True)):
                return start
            start += 2
        return 0

    return cut


def _batches(found: Iterable[str | None], characters: int) -> Iterator[list[str | None]]:
    """The pieces, gathered until they have so many characters."""
    gathered, held = list[str | None](), 0
    for piece in found:
        gathered.append(piece)
        held += OF_A_PIECE + len(piece or "")
        if held >= characters:
            yield gathered
            gathered, held = [], 0
    yield gathered


def _place(shard: Shard, gathered: list[str | None], first: int, number: int) -> str:
    """The file and the document of the `number`-th text of `gathered`, which begins in document `first`."""
    at = [at for at, piece in enumerate(gathered) if piece is not None][number]
    document = first + gathered[:at].count(None)
    path = shard.paths[document if shard.kind == "text" else 0]
    return f", in {path}: document {document + 1:,}" + (f" from {shard.start:,} on" if shard.start else "")

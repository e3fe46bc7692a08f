"""Tokenizes shards into token files, each visible only when it is whole, in several worker processes.

Workers are fresh processes, not forks: a fork copies the locks of threads that it does not copy, and libraries here run
threads. A worker whose parent is gone finds its pipe closed and ends. The first shard that fails stops the rest; shards
that are done stay done.
"""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np

from megalite.data.token_file import dtype_for
from megalite.data.tokenizers import TextTokenizer, load_tokenizer
from megalite.errors.problems import UserError
from megalite.prepare.reading import PIECE, Piece, Shard, pieces
from megalite.prepare.token_writer import TokenWriter

MOST_PIECES = 4096  # that are tokenized in one call
OF_A_WORKER = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

Job = tuple[Shard, Path]  # what to read, and which token file to write
Count = Callable[[Path, int, int, int], None]  # a token file, and its bytes of text, documents and tokens so far


def tokenize_shards(jobs: list[Job], tokenizer: TextTokenizer, folder: Path, workers: int, count: Count) -> None:
    """Do all `jobs`; `folder` holds the tokenizer for the workers."""
    if len(jobs) <= 1 or workers <= 1:
        for job in jobs:
            tokenize_shard(job, tokenizer, 4 * PIECE, count)  # one process has all cores
        return
    waiting, busy = jobs[::-1], set[Connection]()
    try:
        with _team(folder, min(workers, len(jobs))) as idle:
            while waiting or busy:
                while waiting and idle:
                    busy.add(connection := idle.pop())
                    connection.send(waiting.pop())
                for connection in cast(list[Connection], wait(busy)):
                    answer = connection.recv()
                    if isinstance(answer, Exception):
                        raise answer
                    if answer is not None:
                        count(*answer)
                    else:
                        busy.remove(connection)
                        idle.append(connection)
    except (EOFError, ConnectionError) as error:
        raise RuntimeError("a tokenizing process was ended (out of memory?)") from error


@contextmanager
def _team(folder: Path, size: int) -> Iterator[list[Connection]]:
    """Pipes to that many workers. They are ended on leaving, at once if they are still at work."""
    context, before = multiprocessing.get_context("spawn"), os.environ.get("PYTHONSAFEPATH")
    main = sys.modules["__main__"]
    processes: list[SpawnProcess] = []
    pipes: list[Connection] = []
    try:
        os.environ["PYTHONSAFEPATH"] = "1"  # a worker imports no module of the current folder ...
        sys.modules["__main__"] = ModuleType(
            "__main__"
        )  # ... and does not run the user's script, which may prepare, too
        try:
            for _ in range(size):
                ours, theirs = context.Pipe()
                pipes.append(ours)
                processes.append(process := context.Process(target=_serve, args=(theirs, folder), daemon=True))
                process.start()
                theirs.close()  # so that a worker's end closes with it
        finally:
            sys.modules["__main__"] = main
            os.environ.pop("PYTHONSAFEPATH") if before is None else os.environ.update(PYTHONSAFEPATH=before)
        yield list(pipes)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
        for pipe in pipes:
            pipe.close()


def _serve(connection: Connection, folder: Path) -> None:
    """What a worker does: shards, until nobody sends any."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    os.environ.update(OF_A_WORKER)
    try:
        tokenizer = load_tokenizer(folder)
        while True:
            job = connection.recv()
            answer: Exception | None = None
            try:
                tokenize_shard(job, tokenizer, PIECE, lambda *counts: connection.send(counts))
            except BrokenPipeError:
                raise
            except (UserError, OSError) as error:
                answer = error
            except Exception:
                answer = RuntimeError(f"{job[0].paths}: {traceback.format_exc()}")
            connection.send(answer)
    except (EOFError, OSError):
        os._exit(1)  # the parent is gone, and with it whoever would read a message


def tokenize_shard(job: Job, tokenizer: TextTokenizer, batch: int, count: Count) -> None:
    """Write the token file of one shard, `batch` characters at a time."""
    shard, target = job
    writer = TokenWriter(target, dtype_for(tokenizer.vocab_size))
    end = np.array([] if tokenizer.end_of_document is None else [tokenizer.end_of_document], dtype=np.int64)
    size = skipped = 0  # bytes of text, in UTF-8; rows without text
    begun = False  # the document has text
    try:
        for gathered in _batches(pieces(shard), batch):
            encoded = iter(tokenizer.encode_many([piece.text for piece in gathered if piece.text]))
            for piece in gathered:
                if piece.text:
                    writer.add(next(encoded))
                    size += len(piece.text) if piece.text.isascii() else len(piece.text.encode())
                    begun = True
                if piece.ends_document and begun:
                    writer.add(end)
                    writer.end_document()
                skipped += piece.ends_document and not begun
                begun = begun and not piece.ends_document
            count(target, size, writer.documents, writer.tokens)
        writer.finish({"bytes": size, "skipped_documents": skipped})
    except BaseException:
        writer.discard()
        raise
    count(target, max(size, shard.size), writer.documents, writer.tokens)  # what is not text is done with, too


def _batches(found: Iterable[Piece], characters: int) -> Iterator[list[Piece]]:
    """The pieces, gathered until they have so many characters."""
    gathered: list[Piece] = []
    held = 0
    for piece in found:
        gathered.append(piece)
        held += len(piece.text or "")
        if held >= characters or len(gathered) >= MOST_PIECES:
            yield gathered
            gathered, held = [], 0
    yield gathered

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
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np

from megalite.data.cuts import CONTEXT, PIECE
from megalite.data.permutation import IntArray
from megalite.data.token_file import dtype_for
from megalite.data.tokenizer_folder import load_tokenizer
from megalite.data.tokenizers import TextTokenizer
from megalite.errors.problems import UserError
from megalite.prepare.reading import Shard, pieces
from megalite.prepare.token_writer import TokenWriter

OF_A_PIECE = 256  # characters that a piece counts for by itself: many short ones take memory, too
OF_A_WORKER = {  # one thread each; and a module of the current folder is not imported
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONSAFEPATH": "1",
}

Job = tuple[Path, Shard]  # the token file to write, and the text that it is made of
Piece = tuple[int, str, str | None]  # number of a document, the end of what it has so far, what follows (None: its end)
Count = Callable[[Path, int, int, int], None]  # a token file, and its bytes of text, documents and tokens so far


def tokenize_shards(jobs: list[Job], tokenizer: TextTokenizer, folder: Path, workers: int, count: Count) -> None:
    """Do all `jobs`; `folder` holds the tokenizer for the workers."""
    if len(jobs) <= 1 or workers <= 1:
        for job in jobs:
            tokenize_shard(job, tokenizer, 4 * PIECE, count)  # one process has all cores
        return
    waiting, team = jobs[::-1], _start(folder, min(workers, len(jobs)))
    busy = set(team)
    try:
        while busy:
            for pipe in cast(list[Connection], wait(busy)):
                answer = pipe.recv()
                if isinstance(answer, Exception):
                    raise answer
                if answer is not None:
                    count(*answer)
                elif waiting:
                    pipe.send(waiting.pop())
                else:
                    busy.remove(pipe)
    except (EOFError, ConnectionError) as error:
        raise RuntimeError("a tokenizing process was ended (out of memory?)") from error
    finally:
        for process in team.values():
            process.kill()
            process.join()


def _start(folder: Path, size: int) -> dict[Connection, multiprocessing.context.SpawnProcess]:
    """`size` workers, and a pipe to each."""
    context, main, before = multiprocessing.get_context("spawn"), sys.modules["__main__"], dict(os.environ)
    team = {}
    try:
        os.environ.update(OF_A_WORKER)
        sys.modules["__main__"] = ModuleType("__main__")  # workers do not run the user's script, which may prepare, too
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, folder), daemon=True)
            process.start()
            theirs.close()  # so that a worker's end closes with it
            team[ours] = process
        return team
    finally:
        sys.modules["__main__"] = main
        for name in OF_A_WORKER:
            os.environ.pop(name)
        os.environ.update(before)


def _work(pipe: Connection, folder: Path) -> None:
    """A worker: says with None that it is idle, and does a job, again and again until it is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    try:
        tokenizer = load_tokenizer(folder)
        while True:
            pipe.send(None)
            tokenize_shard(pipe.recv(), tokenizer, PIECE, lambda *counts: pipe.send(counts))
    except (EOFError, ConnectionError):
        os._exit(1)  # the parent is gone, and with it whoever would read a message
    except (UserError, OSError) as error:
        pipe.send(error)
    except Exception:
        pipe.send(RuntimeError(traceback.format_exc()))


def tokenize_shard(job: Job, tokenizer: TextTokenizer, batch: int, count: Count) -> None:
    """Write the token file of one shard, `batch` characters at a time."""
    target, shard = job
    end = np.array([] if tokenizer.end_of_document is None else [tokenizer.end_of_document], dtype=np.int64)
    size = skipped = 0  # bytes of text, in UTF-8; rows without text
    with TokenWriter(target, dtype_for(tokenizer.vocab_size)) as writer:
        for gathered in _batches(pieces(shard, tokenizer.cut), batch):
            encoded = iter(_encoded(gathered, tokenizer, shard))
            for _, before, text in gathered:
                if text is not None:
                    size += len(text) if text.isascii() else len(text.encode())
                    writer.add(next(encoded))
                elif before:
                    writer.add(end)
                    writer.end_document()
                else:
                    skipped += 1
            count(target, size, writer.documents, writer.tokens)
        found = {"bytes": size, "documents": writer.documents, "tokens": writer.tokens, "skipped_documents": skipped}
        writer.finish(found)
    count(target, max(size, shard.size), writer.documents, writer.tokens)  # what is not text is done with, too


def _batches(found: Iterable[str | None], characters: int) -> Iterator[list[Piece]]:
    """The pieces, gathered until they have so many characters."""
    gathered: list[Piece] = []
    document, before, held = 0, "", 0
    for text in found:
        gathered.append((document, before, text))
        document, before = (document + 1, "") if text is None else (document, text[-CONTEXT:])
        held += OF_A_PIECE + len(text or "")
        if held >= characters:
            yield gathered
            gathered, held = [], 0
    yield gathered


def _encoded(gathered: list[Piece], tokenizer: TextTokenizer, shard: Shard) -> list[IntArray]:
    """The ids of all pieces of text; UserError with the place of the first that the tokenizer refuses."""
    found = [(document, before, text) for document, before, text in gathered if text is not None]
    try:
        return tokenizer.encode_many([text for *_, text in found], [before for _, before, _ in found])
    except UserError:
        for document, before, text in found:
            try:
                tokenizer.encode_many([text], [before])
            except UserError as error:
                path = shard.paths[document if shard.kind == "text" else 0]
                place = f"{path}: document {document + 1:,}" + (f" from {shard.start:,} on" if shard.start else "")
                raise UserError([replace(it, rule=f"{it.rule}, in {place}") for it in error.problems]) from error
        raise

"""Hands shards to worker processes, each a fresh Python that tokenizes one shard after the other.

Fresh processes, not forks: a fork copies the locks of threads that it does not copy, and libraries here run threads. A
worker whose parent is gone finds its pipe closed and ends. The first shard that fails stops the rest; shards that are
done stay done.
"""

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import cast

from megalite.data.tokenizers import TextTokenizer, load_tokenizer
from megalite.errors.problems import Problem, UserError
from megalite.prepare.reading import PIECE, Shard
from megalite.prepare.shard_tokens import tokenize_shard

BATCH = 4 * PIECE  # characters that are tokenized in one call where one process has all cores
OF_A_WORKER = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
SAFE_PATH = {"PYTHONSAFEPATH": "1"}  # it imports no module of the current folder

Job = tuple[int, Shard, Path]  # number, what to read, which token file to write
Counts = Callable[[int, int, int, int], None]  # number of the job, its bytes, documents and tokens so far


def tokenize_shards(jobs: list[Job], tokenizer: TextTokenizer, folder: Path, workers: int, counts: Counts) -> None:
    """Do all `jobs`; `folder` holds the tokenizer for the workers."""
    if len(jobs) <= 1 or workers <= 1:
        for number, shard, target in jobs:
            with refusing_full_disk(target.parent):
                tokenize_shard(shard, tokenizer, target, BATCH, lambda *so_far, number=number: counts(number, *so_far))
        return
    waiting = jobs[::-1]
    with _team(folder, min(workers, len(jobs))) as team:
        busy: dict[Connection, Job] = {}
        for connection in team:
            busy[connection] = waiting.pop()
            _give(connection, busy[connection])
        while busy:
            for ready in wait(list(busy)):
                connection = cast(Connection, ready)
                number, _, target = busy[connection]
                if (progress := _answer(connection, target)) is not None:
                    counts(number, *progress)
                elif waiting:
                    busy[connection] = waiting.pop()
                    _give(connection, busy[connection])
                else:
                    del busy[connection]


@contextmanager
def refusing_full_disk(folder: Path) -> Iterator[None]:
    """A full disk is for the user to mend; anything else stays what it is."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        remedy = "free some space or set data.cache_dir (--output) to another disk; what is already prepared is kept"
        problem = Problem("data.cache_dir", str(folder), "no space left for the prepared tokens", remedy)
        raise UserError(problem) from error


@contextmanager
def _team(folder: Path, size: int) -> Iterator[list[Connection]]:
    """Pipes to that many workers. They are ended on leaving, at once if they are still at work."""
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    pipes: list[Connection] = []
    before = {name: os.environ.get(name) for name in SAFE_PATH}
    try:
        os.environ.update(SAFE_PATH)
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, folder), daemon=True)
            with _without_main_module():
                process.start()
            theirs.close()  # so that a worker's end closes with it
            processes.append(process)
            pipes.append(ours)
        yield pipes
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


@contextmanager
def _without_main_module() -> Iterator[None]:
    """A worker imports what it needs, and does not run the user's script again, which might prepare text, too."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _give(connection: Connection, job: Job) -> None:
    with contextlib.suppress(BrokenPipeError):  # a worker that is gone: `_answer` says so
        connection.send(job[1:])


def _answer(connection: Connection, target: Path) -> tuple[int, int, int] | None:
    """What a worker says: how far it is, or None when its shard is done. Raises what has gone wrong there."""
    try:
        answer = connection.recv()
    except (EOFError, ConnectionResetError) as error:
        raise RuntimeError(f"a tokenizing process was ended (out of memory?) at {target.name}") from error
    if isinstance(answer, Exception):
        with refusing_full_disk(target.parent):
            raise answer
    assert answer is None or isinstance(answer, tuple)
    return answer


def _serve(connection: Connection, folder: Path) -> None:
    """What a worker does: shards, until nobody sends any."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    os.environ.update(OF_A_WORKER)
    try:
        tokenizer = load_tokenizer(folder)
        while True:
            shard, target = connection.recv()
            try:
                tokenize_shard(shard, tokenizer, target, PIECE, lambda *counts: connection.send(counts))
                connection.send(None)
            except BrokenPipeError:
                raise
            except (UserError, OSError) as error:
                connection.send(error)
            except Exception:
                connection.send(RuntimeError(f"a tokenizing process failed:\n{traceback.format_exc()}"))
    except (EOFError, OSError):
        os._exit(1)  # the parent is gone, and with it whoever would read a message

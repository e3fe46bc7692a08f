"""Shards to worker processes: each worker is a fresh Python that a thread of ours feeds and listens to.

Fresh processes, not forks: a fork copies the locks of threads that it does not copy, and libraries here run threads.
The first shard that fails stops the rest; shards that are done stay done.
"""

import errno
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import megalite
from megalite.config.problems import Problem, UserError
from megalite.data import worker
from megalite.data.reading import Shard
from megalite.data.tokenizers import TextTokenizer

Job = tuple[int, Shard, Path]  # number, what to read, which token file to write
Counts = Callable[[int, int, int, int], None]  # number of the job, its bytes, documents and tokens so far


def tokenize_shards(jobs: list[Job], tokenizer: TextTokenizer, folder: Path, workers: int, counts: Counts) -> None:
    """Do all `jobs`; `folder` holds the tokenizer for the workers."""
    if len(jobs) <= 1 or workers <= 1:
        for number, shard, target in jobs:
            try:
                worker.tokenize_shard(
                    shard, tokenizer, target, worker.BATCH, lambda *so_far, number=number: counts(number, *so_far)
                )
            except OSError as error:
                raise storage_error(error.errno, target.parent, error) from error
        return
    pending: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        pending.put(job)
    team = [_Worker(folder, pending, counts) for _ in range(min(workers, len(jobs)))]
    try:
        for member in team:
            member.thread.start()
        for member in team:
            while member.thread.is_alive():
                member.thread.join(0.1)
                if any(other.failure for other in team):
                    break
    finally:
        for member in team:
            member.stop()
    failures = [member.failure for member in team if member.failure]
    problems = [problem for failure in failures if isinstance(failure, UserError) for problem in failure.problems]
    if problems:
        raise UserError(problems)
    if failures:
        raise failures[0]


def storage_error(number: int | None, folder: Path, error: Exception) -> Exception:
    """A full disk is for the user to mend; anything else stays what it is."""
    if number not in (errno.ENOSPC, errno.EDQUOT):
        return error
    remedy = "free some space or set data.cache_dir to another disk; what is already prepared is kept"
    return UserError(Problem("data.cache_dir", str(folder), "no space left for the prepared tokens", remedy))


class _Worker:
    """One worker process and the thread that talks to it."""

    def __init__(self, folder: Path, pending: "queue.SimpleQueue[Job]", counts: Counts) -> None:
        self.failure: Exception | None = None
        self._folder, self._pending, self._counts = folder, pending, counts
        package = str(Path(megalite.__file__).parent.parent)
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {"PYTHONPATH": os.pathsep.join(paths), "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", worker.__name__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | settings,
            text=True,
        )
        self.thread = threading.Thread(target=self._run, daemon=True)

    def stop(self) -> None:
        """End the process, at once if it is still at work."""
        self._process.kill()
        self._process.wait()
        if self.thread.ident:
            self.thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()

    def _run(self) -> None:
        try:
            while True:
                try:
                    number, shard, target = self._pending.get_nowait()
                except queue.Empty:
                    return
                self._do(number, shard, target)
        except (OSError, ValueError, UserError, RuntimeError) as error:
            self.failure = error

    def _do(self, number: int, shard: Shard, target: Path) -> None:
        """Send one job and follow it to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(worker.job_line(shard, target))
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            reply = json.loads(line)
            if "progress" in reply:
                self._counts(number, *reply["progress"])
            elif "problems" in reply:
                raise UserError([Problem(**problem) for problem in reply["problems"]])
            elif "error" in reply:
                failure = RuntimeError(f"a tokenizing process failed:\n{reply['error']}")
                raise storage_error(reply["errno"], target.parent, failure)
            else:
                return
        raise RuntimeError(
            f"a tokenizing process ended with status {self._process.wait()} (out of memory?) at {target.name}"
        )

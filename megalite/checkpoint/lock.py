"""Locks a run folder, so that one live job at a time writes to it.

The file `lock` names its holder. On one host the kernel's lock on the file (flock) decides: it ends with the process,
so a killed job's lock is taken over at once. Another host may not see that kernel lock. There the holder's heartbeat
decides: a lock whose modification time stands still while we watch belongs to a dead job. The time is never compared
with our clock, so clocks may disagree.
"""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from megalite.config.durable_files import open_to_append
from megalite.config.user_files import read_object
from megalite.errors.problems import Problem, UserError

BEAT_S = 5.0
PATIENCE_S = 25.0  # several beats, so that a slow file server is not taken for a dead job


class RunLock:
    """A held lock; beats until released. `token` is different for every lock that was ever taken."""

    def __init__(self, path: Path, *, beat_s: float = BEAT_S, patience_s: float = PATIENCE_S) -> None:
        """Take the lock at `path`. UserError where a live job has it, OSError where the file cannot be written."""
        self.path, self.token = path, secrets.token_hex(8)
        self._file = open_to_append(path)
        try:
            self._take(patience_s)
        except BaseException:
            self._file.close()
            raise
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, args=(beat_s,), name="run lock", daemon=True)
        self._heart.start()

    def lost(self) -> str | None:
        """Why the file no longer names this job, None if it does. A job on another host may have taken it for dead."""
        holder = holder_of(self.path)
        if holder.get("token") == self.token:
            return None
        if self.path.exists():
            return f"another job has taken over the run folder: {_in_words(holder)}"
        return f"the run folder {self.path.parent} is not there any more: it was moved or deleted"

    def release(self) -> None:
        """Give the lock back, leaving an empty file: deleting it would race with the next job's opening it."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._heart.join()
        if self.lost() is None:
            with contextlib.suppress(OSError):
                self._file.truncate(0)
        self._file.close()

    def _take(self, patience_s: float) -> None:
        here, holder = socket.gethostname(), holder_of(self.path)
        watch = bool(holder)  # its heartbeat decides
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alive, watch = False, watch and holder.get("host") != here
        except BlockingIOError:
            alive = True
        except OSError:  # the file system has no such locks
            alive = False
        if alive or (watch and _beats(self.path, patience_s)):
            remedy = "wait for that job, stop it, or set another run_dir"
            raise UserError(Problem("run_dir", str(self.path.parent), f"it is in use by {_in_words(holder)}", remedy))
        facts = {"host": here, "pid": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        self._file.truncate(0)
        self._file.write(json.dumps(facts | {"job": os.environ.get("SLURM_JOB_ID"), "token": self.token}))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _beat(self, beat_s: float) -> None:
        while not self._stop.wait(beat_s):
            with contextlib.suppress(OSError):  # a server that is away for a while is no reason to stop training
                os.utime(self._file.fileno())


def holder_of(path: Path) -> dict[str, Any]:
    """What the lock file says of its holder; nothing where it cannot be read, was released, or is torn."""
    try:
        return read_object(path)  # opened anew, so that NFS asks the server
    except UserError:
        return {}


def _in_words(holder: dict[str, Any]) -> str:
    if not holder:
        return "a process that has not written its name yet"
    job = f", SLURM job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid')} on {holder.get('host')}{job}, since {holder.get('started')}"


def _beats(path: Path, patience_s: float) -> bool:
    """Whether the modification time changes within `patience_s`."""
    deadline, times = time.monotonic() + patience_s, set[int]()
    while len(times) < 2 and time.monotonic() < deadline:
        with open(path, "rb") as file:  # opened anew, so that NFS asks the server
            times.add(os.fstat(file.fileno()).st_mtime_ns)
        time.sleep(min(1.0, patience_s / 10))
    return len(times) > 1

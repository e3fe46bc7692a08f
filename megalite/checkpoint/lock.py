"""Locks a run folder, so that one live job at a time writes to it.

The file `lock` names its holder. On one host the kernel's lock on the file (flock) decides: it ends with the process,
so a killed job's lock is taken over at once. Another host may not see that kernel lock. There the holder's heartbeat
decides: a lock whose modification time stands still while we watch belongs to a dead job. The time is never compared
with our clock, so clocks may disagree.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from megalite.config.user_files import as_record, read_bytes
from megalite.errors.problems import UserError

BEAT_S = 5.0
PATIENCE_S = 25.0  # several beats, so that a slow file server is not taken for a dead job


@dataclass(frozen=True)
class Holder:
    """The job that holds a lock. `token` is different for every lock that was ever taken."""

    host: str
    pid: int
    started: str
    job: str | None  # SLURM's job id
    token: str

    def __str__(self) -> str:
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.started}"


class LockHeldError(Exception):
    """Another live job has the lock."""

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(str(holder or "a process that has not written its name yet"))


class RunLock:
    """A held lock; beats until released."""

    def __init__(self, path: Path, *, beat_s: float = BEAT_S, patience_s: float = PATIENCE_S) -> None:
        """Take the lock at `path`, or raise LockHeldError; OSError where the file cannot be written."""
        self.path = path
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        token = secrets.token_hex(8)
        self.holder = Holder(socket.gethostname(), os.getpid(), now, os.environ.get("SLURM_JOB_ID"), token)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file", str(path))
            self._take(patience_s)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, args=(beat_s,), name="run lock", daemon=True)
        self._heart.start()

    def lost(self) -> str | None:
        """Why the file no longer names this job, None if it does. A job on another host may have taken it for dead."""
        holder = holder_of(self.path)
        if holder == self.holder:
            return None
        if holder is not None:
            return f"another job has taken over the run folder: {holder}"
        if os.path.lexists(self.path):
            return f"{self.path} does not name this job any more, nor another"
        return f"the run folder {self.path.parent} is not there any more: it was moved or deleted"

    def release(self) -> None:
        """Give the lock back, leaving an empty file: deleting it would race with the next job's opening it."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._heart.join()
        if self.lost() is None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _take(self, patience_s: float) -> None:
        ours: bool | None = True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            ours = False
        except OSError:
            ours = None  # the file system has no such locks
        before = _parse(os.pread(self._descriptor, 1 << 16, 0))
        if ours is False:
            raise LockHeldError(before)
        known_dead = ours and before is not None and before.host == self.holder.host
        if before is not None and not known_dead and _beats(self.path, patience_s):
            raise LockHeldError(before)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(vars(self.holder)).encode(), 0)
        os.fsync(self._descriptor)

    def _beat(self, beat_s: float) -> None:
        while not self._stop.wait(beat_s):
            with contextlib.suppress(OSError):  # a server that is away for a while is no reason to stop training
                os.utime(self._descriptor)


def holder_of(path: Path) -> Holder | None:
    """The holder that the lock file names, seen from any machine; None where it names nobody or cannot be read."""
    try:
        return _parse(read_bytes(path, follow_links=False))  # opened anew, so that NFS asks the server
    except UserError:
        return None


def _parse(content: bytes) -> Holder | None:
    """The holder; None for a released lock and for one whose writer was killed in the middle of its name."""
    try:
        return as_record(Holder, json.loads(content), "the lock")
    except (ValueError, RecursionError, UserError):
        return None


def _beats(path: Path, patience_s: float) -> bool:
    """Whether the modification time changes within `patience_s`."""
    deadline = time.monotonic() + patience_s
    times: set[int] = set()
    while len(times) < 2 and time.monotonic() < deadline:
        if times:
            time.sleep(min(1.0, patience_s / 10))
        with open(path, "rb") as file:  # opened anew, so that NFS asks the server
            times.add(os.fstat(file.fileno()).st_mtime_ns)
    return len(times) > 1

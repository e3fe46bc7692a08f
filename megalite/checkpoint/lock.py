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


class RunLock:
    """A held lock; beats until released. `token` is different for every lock that was ever taken."""

    def __init__(self, path: Path, *, beat_s: float = 5.0, patience_s: float = 25.0) -> None:
        """Take the lock at `path`. UserError where a live job has it, OSError where the file cannot be written.

        `patience_s`: several beats, so that a slow file server is not taken for a dead job.
        """
        self.path, self.token, here, holder = path, secrets.token_hex(8), socket.gethostname(), holder_of(path)
        self._file = open_to_append(path)
        if self._has_live_holder(holder, patience_s):
            self._file.close()
            known = ", ".join(f"{name} {value}" for name, value in holder.items() if value and name != "token")
            remedy = "wait for that job, stop it, or set another run_dir"
            raise UserError(Problem("run_dir", str(path.parent), f"it is in use by another job: {known}", remedy))
        facts = {"host": here, "pid": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        self._file.truncate(0)
        self._file.write(json.dumps(facts | {"job": os.environ.get("SLURM_JOB_ID"), "token": self.token}))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, args=(beat_s,), name="run lock", daemon=True)
        self._heart.start()

    def lost(self) -> str | None:
        """Why the file no longer names this job, None if it does. A job on another host may have taken it for dead."""
        is_ours = holder_of(self.path).get("token") == self.token
        return None if is_ours else f"the run folder {self.path.parent} was taken over by another job, or was moved"

    def release(self) -> None:
        """Give the lock back, leaving an empty file: deleting it would race with the next job's opening it."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._heart.join()
        if self.lost() is None:
            self._file.truncate(0)
        self._file.close()

    def _has_live_holder(self, holder: dict[str, Any], patience_s: float) -> bool:
        """Whether the kernel knows a process that has the lock, or the holder on another host is seen to beat."""
        here = socket.gethostname()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # the file system has no such locks: the heartbeat decides on this host, too
            here = ""
        if not holder or holder.get("host") == here:
            return False
        deadline, times = time.monotonic() + patience_s, set[int]()
        while len(times) < 2 and time.monotonic() < deadline:
            with open(self.path, "rb") as file:  # opened anew, so that NFS asks the server
                times.add(os.fstat(file.fileno()).st_mtime_ns)
            time.sleep(min(1.0, patience_s / 10))
        return len(times) > 1

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

"""Tells the script that started this job what has become of it: a file of one JSON object, at launch.status_file.

    {"state": "stopped", "step": 1200, "steps": 5000, "run_dir": "/scratch/run", "by": "SIGUSR1"}

`running`: training, or killed; `stopped`: ended on request, saved, to be started again; `finished`: nothing remains;
`failed`: look at the log. `step` is the newest that is saved. A start that is refused, or is ended before it has built
its model, writes nothing. A batch script that exports JOB_BEGAN judges its time limit by three more fields: steps that
this start has `gained`, `start_up_s` from JOB_BEGAN on, and `step_s`, the mean of these steps with their saves and
evaluations, null before the first save. An exit status cannot tell these apart: torchrun's is 1 after a stop in which
all ranks ended in order.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from megalite.config.own_files import STATUS, write_atomically
from megalite.config.user_files import absolute
from megalite.errors.problems import Problem, UserError

JOB_BEGAN = "MEGALITE_JOB_BEGAN"  # seconds since the epoch


class StatusFile:
    """The file of one start. Rank 0 writes it; on other ranks, and without a path, nothing happens."""

    def __init__(self, path: str | None, run_dir: Path, steps: int) -> None:
        self._path, self._fixed = Path(absolute(path)) if path else None, {"steps": steps, "run_dir": str(run_dir)}
        self._first = self._step = 0
        self._trains_s = 0.0  # since the epoch
        self.is_running = False

    def begin(self, step: int) -> None:
        """Training begins after `step`. UserError where the file cannot be written."""
        self._first, self._step, self._trains_s = step, step, time.time()
        try:
            self._write("running")
        except OSError as error:
            remedy = "a file in a folder where you may write, on a disk with room"
            raise UserError(Problem("launch.status_file", str(self._path), f"{error.strerror}", remedy)) from error
        self.is_running = True

    def saved(self, step: int) -> None:
        """The checkpoint of `step` is complete."""
        self._step = step
        with suppress(OSError):
            self._write("running")

    def end(self, state: str, by: str | None = None) -> None:
        """The start has stopped, finished or failed."""
        self.is_running = False
        with suppress(OSError):  # the scheduler's script sees the old state, and the run is saved
            self._write(state, by)

    def _write(self, state: str, by: str | None = None) -> None:
        if self._path is None:
            return
        status = {"state": state, "step": self._step, **self._fixed, **({"by": by} if by else {})}
        if job_began := os.environ.get(JOB_BEGAN):
            gained = self._step - self._first
            status |= {"gained": gained, "start_up_s": round(self._trains_s - float(job_began), 1)}
            status["step_s"] = round((time.time() - self._trains_s) / gained, 3) if gained else None
        write_atomically(self._path, (json.dumps(status) + "\n").encode(), STATUS)

"""What rank 0 keeps of a run: metrics.jsonl, events.jsonl, report.html and, if there are any, trackers elsewhere.

All of them are told the same, in this order. A file that cannot be written (a full disk) costs lines and is told once,
until it can be written again; it never ends the run.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megalite.checkpoint.commit import open_to_append, replace_synced
from megalite.config.settings import as_plain
from megalite.errors.problems import Problem, UserError
from megalite.observe.background import BackgroundTracker, finish_trackers
from megalite.observe.report.data import gather
from megalite.observe.report.write import LiveReport
from megalite.train.history import EVENTS, IN_THE_WAY, METRICS, Tell, read_metrics
from megalite.train.job import Job


class Chronicle:
    """The records of one run, on the rank that writes them."""

    def __init__(self, job: Job, tell: Callable[[str], None], trackers: Sequence[BackgroundTracker]) -> None:
        """Continues what the run folder holds. Raises UserError where that cannot be."""
        folder = job.folder.path
        self._tell, self._trackers = tell, trackers
        self.metrics_path = folder / METRICS
        self._metrics = MetricsFile(self.metrics_path, resume_step=job.progress.step, tell=tell)
        self._events = EventsFile(folder)
        self._behind: set[str] = set()  # files whose last line could not be written
        self.run = gather(folder, as_plain(job.config), read_metrics(self.metrics_path))
        self._report = LiveReport(self.run, job.config.log.report_interval_s, tell)

    def record(self, line: dict[str, Any]) -> None:
        """A line of metrics."""
        self._attempt(METRICS, lambda: self._metrics.append(line))
        self.run.record(line)
        for tracker in self._trackers:
            tracker.record(line)
        self._report.refresh()

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Something that happened, see events.py."""
        line = event(kind, step, **fields)
        self._attempt(EVENTS, lambda: self._events.append(line))
        self.run.happened(line)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """What the model makes of a prompt."""
        self.event("sample", step, prompt=prompt, text=text)
        for tracker in self._trackers:
            tracker.sample(step, prompt, text)

    def end(self, kind: str, step: int, *, status: int, **fields: Any) -> None:
        """The run has ended: `stopped`, `finished` or `failed`, with this exit status."""
        self.event(kind, step, status=status, **fields)
        self._report.draw(live=False)
        self._finish_trackers(status)

    def close(self) -> None:
        """Nothing more will be told."""
        self._finish_trackers(1)  # those of a run that another job has taken over
        self._metrics.close()
        self._events.close()

    def _finish_trackers(self, status: int) -> None:
        trackers, self._trackers = self._trackers, []
        finish_trackers(trackers, status)

    def _attempt(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if name not in self._behind:
                self._tell(f"warning: {name} cannot be written for now: {error.strerror}")
            self._behind.add(name)
        else:
            self._behind.discard(name)


class MetricsFile:
    """The metrics of one run, written by one rank."""

    def __init__(self, path: Path, *, resume_step: int, tell: Tell = lambda text: None) -> None:
        """Open `path` for appending, keeping only records of steps up to `resume_step`; `tell` hears what was none."""
        try:
            kept = [record for record in read_metrics(path, tell) if record["step"] <= resume_step]
            replace_synced(path, "".join(f"{json.dumps(record)}\n" for record in kept).encode())
            self._file = open_to_append(path)
        except OSError as error:
            rule = f"it cannot be continued: {error}"
            raise UserError(Problem("run_dir", str(path), rule, IN_THE_WAY)) from error

    def append(self, record: dict[str, Any]) -> None:
        """One line, handed to the operating system at once: killing the process does not lose it."""
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take was told when it was written
            self._file.close()


class EventsFile:
    """The events of one run, written by one rank."""

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / EVENTS
        try:
            self._file = open_to_append(path)
            torn = _is_torn(path)
        except OSError as error:
            rule = f"{EVENTS} cannot be continued: {error.strerror}"
            raise UserError(Problem("run_dir", str(run_dir), rule, IN_THE_WAY)) from error
        if torn:
            self._file.write("\n")  # what a killed run had begun stays a line of its own

    def append(self, event: dict[str, Any]) -> None:
        """One line, handed to the operating system at once. Raises OSError where that fails."""
        self._file.write(json.dumps(event) + "\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _is_torn(path: Path) -> bool:
    """Whether the last line lacks its end."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def event(kind: str, step: int, **fields: Any) -> dict[str, Any]:
    """What happens now."""
    return {"time": round(time.time(), 3), "step": step, "kind": kind, **fields}

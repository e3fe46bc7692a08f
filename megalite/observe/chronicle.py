"""What rank 0 keeps of a run: metrics.jsonl, events.jsonl, report.html and what trackers show.

All get the same lines, in one order: a record of a step or an evaluation, or an event, which has a `kind`
(train/history.py). What cannot be written (a full disk) is reported once, until it can be written again; it never ends
the run.
"""

import contextlib
import errno
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from megalite.config.durable_files import open_to_append, write_atomically
from megalite.observe import trackers
from megalite.observe.log import writing
from megalite.observe.report.write import Attempts, LiveReport
from megalite.observe.run_data import read_run
from megalite.train.history import EVENTS, METRICS, PIPELINE, Note, Seal, changes, read_metrics
from megalite.train.job import Job
from megalite.train.recorder import TimedAction


class Chronicle:
    """The records of one run, on the rank that writes them."""

    def __init__(self, job: Job, note: Note) -> None:
        """Continues what the run folder holds. Raises UserError where that cannot be."""
        folder, step = job.folder.path, job.progress.step
        changed = changes(folder, job.record, step)
        self._trackers = trackers.open_trackers(job.config, folder, step, note)
        self._metrics = RecordFile(folder / METRICS, note, last_step=step)
        self._events = RecordFile(folder / EVENTS, note)
        self._pipeline = RecordFile(folder / PIPELINE, note) if job.config.train.record_pipeline else None
        self.run = read_run(folder)
        self._report = LiveReport(self.run, job.config.log.report_interval_s, note)
        for message in changed:
            note(f"warning: {message}")
            self.event("record_changed", step, message=message)

    def add(self, line: dict[str, Any]) -> None:
        """Keep a record or an event."""
        (self._events if "kind" in line else self._metrics).append(line)
        self.run.add(line)
        self._trackers.add(line)
        if "kind" not in line:
            self._report.refresh()

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Something happened now."""
        self.add({"time": round(time.time(), 3), "step": step, "kind": kind, **fields})

    def seals(self) -> dict[str, dict[str, Any]]:
        """Bytes and hash of each file of the record; none of a file that a write has failed for."""
        files = {METRICS: self._metrics, EVENTS: self._events}
        return {name: vars(seal) for name, file in files.items() if (seal := file.seal()) is not None}

    def pipeline(self, step: int, schedule: str, ranks: Sequence[Sequence[TimedAction]]) -> None:
        """When each rank of a pipeline did what: lines of pipeline.jsonl."""
        assert self._pipeline is not None, "train.record_pipeline asks for it"
        for rank, actions in enumerate(ranks):
            line = {"step": step, "schedule": schedule, "pp": len(ranks), "rank": rank, "actions": actions}
            self._pipeline.append(line)

    def end(self, kind: str, step: int, *, status: int, **fields: Any) -> None:
        """The run has ended: `stopped`, `finished` or `failed`, with this exit status."""
        self.event(kind, step, status=status, **fields)
        self._report.draw(live=False)
        self._trackers.finish(status)

    def close(self) -> None:
        """No more lines will come."""
        self._trackers.finish(1)  # those of a run that another job has taken over
        self._metrics.close()
        self._events.close()
        if self._pipeline is not None:
            self._pipeline.close()


_TORN = re.compile(rb'(\{"[^\n]*)?')  # what a run that was killed with its first record leaves


class RecordFile:
    """A file of JSON lines that one rank of one run writes."""

    def __init__(self, path: Path, note: Note, *, last_step: int | None = None) -> None:
        """Open `path` for appending. With `last_step` only records of steps up to it stay, and `note` names lines that
        are none. Raises UserError where that cannot be."""
        self.path, self._attempt = path, Attempts(path.name, note)
        with writing(path):
            if last_step is not None:
                records = read_metrics(path, note)
                if not records and path.is_file() and not _TORN.fullmatch(path.read_bytes()):
                    raise FileExistsError(errno.EEXIST, "it holds no record of a run", str(path))
                open_to_append(path).close()  # refuses what is no file of its own, before that is replaced
                kept = [record for record in records if record["step"] <= last_step]
                write_atomically(path, "".join(f"{json.dumps(record)}\n" for record in kept).encode())
            self._file = open_to_append(path)
            content = path.read_bytes()
        self._bytes, self._hash = len(content), xxhash.xxh3_128(content)  # of what the file holds
        self._known = True  # whether it still is
        if content and not content.endswith(b"\n"):
            self._attempt(lambda: self._write("\n"))  # what a killed run had begun stays a line of its own

    def append(self, line: dict[str, Any]) -> None:
        """Hand a line to the operating system at once: killing the process does not lose it."""
        self._attempt(lambda: self._write(json.dumps(line) + "\n"))

    def seal(self) -> Seal | None:
        """What the file holds; None where a write has failed: who knows what of it is there."""
        return Seal(self._bytes, self._hash.hexdigest()) if self._known else None

    def _write(self, text: str) -> None:
        known, self._known = self._known, False
        self._file.write(text)
        self._bytes, self._known = self._bytes + len(text), known  # JSON is ASCII
        self._hash.update(text.encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take was reported when it was written
            self._file.close()

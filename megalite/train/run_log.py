"""The record of a run: its files, its views, and a log of each rank.

Rank 0 writes metrics.jsonl, events.jsonl and pipeline.jsonl, which are the interface: every view (terminal, report,
trackers) is given the same records, in the same order. A record is the metrics of a step (StepMetrics.to_json), an
evaluation (with `val_loss`) or an event, which has a `kind`; history.py lists the kinds and reads the files. What
cannot be written (a full disk) is reported once, until it can be written again; it never ends the run.

Every rank keeps a log file, for what a terminal cannot keep: who ran where, and what went wrong.
"""

import contextlib
import errno
import faulthandler
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import xxhash

from megalite.config.durable_files import open_to_append, write_atomically
from megalite.errors.problems import Problem, UserError, printable
from megalite.launch.context import ParallelContext
from megalite.train.history import EVENTS, IN_THE_WAY, METRICS, PIPELINE, Note, Seal, changes, read_metrics

if TYPE_CHECKING:
    from megalite.train.setup import Job

NOT_LOGGED = ("start", "resume", "ranks", "sample")  # kinds of events that are long
_TORN = re.compile(rb'(\{"[^\n]*)?')  # what a run that was killed with its first record leaves
Record = dict[str, Any]


class View(Protocol):
    """Shows a run on rank 0: the terminal, the report, trackers. An error of a view is reported once, by the view's
    name, until it works again."""

    name: str

    def add(self, record: Record) -> None:
        """The record is in its file. The last one of a run is an event of a kind in history.ENDS, with the exit status;
        a run that another job has taken over has none."""

    def close(self) -> None:
        """No more records will come. May be repeated."""


class RunLog:
    """The record of a run on one rank."""

    def __init__(self, say: Note) -> None:
        """`say` prints a line for the user, on rank 0."""
        self._say = say
        self._early: list[str] = []  # notes until the run folder is known
        self._log: logging.Logger | None = None
        self._files: dict[str, RecordFile] = {}  # by name; empty on other ranks
        self._views: Sequence[View] = ()
        self._failing: set[str] = set()  # names of files and views that do not work now

    def open(self, job: "Job", open_views: Callable[["Job", Note], Sequence[View]]) -> None:
        """Continue the record in the run's folder. UserError where that cannot be."""
        folder, step = job.folder.path, job.progress.step
        self._log = open_log(folder, job.context)
        for text in self._early:
            self._log.info("%s", text)
        if job.context.rank > 0:
            return
        changed = changes(folder, job.seals, step)
        self._files = {METRICS: RecordFile(folder / METRICS, self.note, step), EVENTS: RecordFile(folder / EVENTS)}
        if job.config.train.record_pipeline:
            self._files[PIPELINE] = RecordFile(folder / PIPELINE)
        self._views = open_views(job, self.note)
        for message in changed:
            self.note(f"warning: {message}")
            self.event("record_changed", step, message=message)

    def note(self, text: str) -> None:
        """Say something that the user should know: a warning, a checkpoint that was passed over."""
        if self._log is None:
            self._early.append(text)
        else:
            self._log.info("%s", text)
        self._say(text)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Record what happened now, after `step`."""
        if self._log is not None and kind not in NOT_LOGGED:
            told = ", ".join(f"{name} {value}" for name, value in fields.items())
            self._log.info("step %d: %s%s", step, kind, f": {told}" if told else "")
        self.add({"time": round(time.time(), 3), "step": step, "kind": kind, **fields})

    def error(self, step: int, text: str) -> None:
        """Keep in this rank's log how the run failed in the step after `step`."""
        if self._log is not None:
            self._log.error("failed at step %d\n%s", step + 1, text)

    def add(self, record: Record) -> None:
        """Keep a record and show it."""
        if self._log is not None and "val_loss" in record:
            self._log.info("step %d: validation loss %.6f", record["step"], record["val_loss"])
        self.append(EVENTS if "kind" in record else METRICS, record)
        for view in self._views:
            self._attempt(view.name, partial(view.add, record))

    def append(self, name: str, record: Record) -> None:
        """Keep a record in the file `name`, on the rank that writes it."""
        if name in self._files:
            self._attempt(name, partial(self._files[name].append, record))

    def seals(self) -> dict[str, dict[str, Any]]:
        """Bytes and hash of each file of the record; none of a file that a write has failed for."""
        files = {name: self._files[name] for name in (METRICS, EVENTS) if name in self._files}
        return {name: vars(seal) for name, file in files.items() if (seal := file.seal()) is not None}

    def close(self) -> None:
        """No more records will come. May be called without `open`."""
        for view in self._views:
            self._attempt(view.name, view.close)
        for file in self._files.values():
            file.close()

    def _attempt(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
            self._failing.discard(name)
        except Exception as error:  # no record of the run is worth the run
            if name not in self._failing:
                self._failing.add(name)
                reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                self.note(f"warning: {name} cannot be written for now: {reason}")


class RecordFile:
    """A file of JSON lines that one rank of one run writes."""

    def __init__(self, path: Path, note: Note = print, last_step: int | None = None) -> None:
        """Open `path` for appending. With `last_step` only records of steps up to it stay, and `note` names lines that
        are none. Raises UserError where that cannot be."""
        self.path = path
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
                self._write("\n")  # what a killed run had begun stays a line of its own

    def append(self, record: Record) -> None:
        """Hand a line to the operating system at once: killing the process does not lose it."""
        self._write(json.dumps(record) + "\n")

    def seal(self) -> Seal | None:
        """The state of the file; None where a write has failed, since nobody knows how much of it is there."""
        return Seal(self._bytes, self._hash.hexdigest()) if self._known else None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take was reported when it was written
            self._file.close()

    def _write(self, text: str) -> None:
        known, self._known = self._known, False
        self._file.write(text)
        self._bytes, self._known = self._bytes + len(text), known  # JSON is ASCII
        self._hash.update(text.encode())


class LogFile(logging.StreamHandler):
    """A log that cannot drive the terminal of its reader. A full disk costs lines of it, nothing else."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Instead of logging's own, which prints a traceback for every line."""


def open_log(run_dir: Path, context: ParallelContext) -> logging.Logger:
    """This rank's logger, appending to `logs/rank-NNNNN.log`; a crashing interpreter leaves its stacks there too."""
    path = run_dir / "logs" / f"rank-{context.rank:05d}.log"
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        file = open_to_append(path)
    faulthandler.enable(file)
    handler = LogFile(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.Logger(f"megalite.rank{context.rank}")
    log.addHandler(handler)
    place = f"rank {context.rank} of {context.world_size} on {socket.gethostname()}, process {os.getpid()}"
    log.info("%s, %s, %s, torch's threads: %d", place, context.device, context.dtype, torch.get_num_threads())
    return log


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the OSError of a file that cannot be written into a UserError that names it."""
    try:
        yield
    except OSError as error:
        why = "it is a link" if path.is_symlink() else error.strerror
        remedy = "make room on its disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else IN_THE_WAY
        raise UserError(Problem("run_dir", str(path), f"cannot be written: {why}", remedy)) from error

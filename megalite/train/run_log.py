"""The record of a run: its files, its views, and a log file of each rank.

Rank 0 writes metrics.jsonl, events.jsonl and pipeline.jsonl, which are the interface: every view (terminal, report,
trackers) is given the same records, in the same order. A record is the metrics of a step (StepMetrics.to_json), an
evaluation (with `val_loss`) or an event, which has a `kind`; history.py lists the kinds and reads the files. What
cannot be written (a full disk) is reported once, until it can be written again; it never ends the run.
"""

import faulthandler
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import torch

from megalite.config.durable_files import open_to_append, write_atomically
from megalite.errors.problems import Problem, UserError, printable
from megalite.errors.remedies import of_system
from megalite.train.history import EVENTS, IN_THE_WAY, METRICS, PIPELINE, Note, changes, read_metrics

if TYPE_CHECKING:
    from megalite.train.setup import Job

NOT_LOGGED = ("start", "resume", "ranks", "sample")  # kinds of events that are long
Record = dict[str, Any]


class View(Protocol):
    """Shows a run on rank 0: the terminal, the report, trackers."""

    name: str  # by which an error of the view is reported, once until it works again

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
        self._log: TextIO | None = None
        self._files: dict[str, TextIO] = {}  # by name; empty on other ranks
        self._views: Sequence[View] = ()
        self._failing: set[str] = set()  # names of files and views that do not work now

    def open(self, job: "Job", open_views: Callable[["Job", Note], Sequence[View]]) -> None:
        """Continue the record in the run's folder. UserError where that cannot be."""
        folder, context, step = job.folder.path, job.context, job.progress.step
        self._log = open_record(folder / "logs" / f"rank-{context.rank:05d}.log")
        faulthandler.enable(self._log)  # a crashing interpreter leaves its stacks there, too
        place = f"rank {context.rank} of {context.world_size} on {socket.gethostname()}, process {os.getpid()}"
        self._write(f"{place}, {context.device}, {context.dtype}, torch's threads: {torch.get_num_threads()}")
        for text in self._early:
            self._write(text)
        if context.rank > 0:
            return
        changed = changes(folder, job.seals, step)
        self._files[METRICS] = open_record(folder / METRICS, self.note, last_step=step)
        for name in (EVENTS, *([PIPELINE] if job.config.train.record_pipeline else [])):
            self._files[name] = open_record(folder / name)
        self._views = open_views(job, self.note)
        for message in changed:
            self.note(f"warning: {message}")
            self.event("record_changed", step, message=message)

    def note(self, text: str) -> None:
        """Say something that the user should know: a warning, a checkpoint that was passed over."""
        if self._log is None:
            self._early.append(text)
        self._write(text)
        self._say(text)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Record what happened now, after `step`."""
        if kind not in NOT_LOGGED:
            words = ", ".join(f"{name} {value}" for name, value in fields.items())
            self._write(f"step {step}: {kind}{f': {words}' if words else ''}")
        self.add({"time": round(time.time(), 3), "step": step, "kind": kind, **fields})

    def error(self, step: int, text: str) -> None:
        """Keep in this rank's log how the run failed in the step after `step`."""
        self._write(f"failed at step {step + 1}\n{text}", "ERROR")

    def add(self, record: Record) -> None:
        """Keep a record and show it."""
        if "val_loss" in record:
            self._write(f"step {record['step']}: validation loss {record['val_loss']:.6f}")
        self.append(EVENTS if "kind" in record else METRICS, record)
        for view in self._views:
            self._attempt(view.name, partial(view.add, record))

    def append(self, name: str, record: Record) -> None:
        """Hand a line of the file `name` to the operating system at once: killing the process does not lose it."""
        if file := self._files.get(name):
            self._attempt(name, lambda: file.write(json.dumps(record) + "\n"))

    def close(self) -> None:
        """No more records will come. May be called without `open`."""
        for view in self._views:
            self._attempt(view.name, view.close)
        for file in self._files.values():
            with suppress(OSError):  # what a full disk did not take was reported when it was written
                file.close()

    def _write(self, text: str, level: str = "INFO") -> None:
        """Add to this rank's log, in which no text can drive the terminal of a reader. A full disk costs lines."""
        if self._log is not None:
            with suppress(OSError):
                self._log.write(f"{datetime.now().isoformat(' ', 'milliseconds')} {level} {printable(text)}\n")

    def _attempt(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
            self._failing.discard(name)
        except Exception as error:  # no record of the run is worth the run
            if name not in self._failing:
                self._failing.add(name)
                reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                self.note(f"warning: {name} cannot be written for now: {reason}")


def open_record(path: Path, note: Note = print, *, last_step: int | None = None) -> TextIO:
    """A file of JSON lines to append to. With `last_step` only records of steps up to it stay, and `note` names lines
    that are none. UserError where that cannot be."""
    try:
        if last_step is not None:
            records = read_metrics(path, note)
            if not records and path.is_file() and b"\n" in path.read_bytes():
                raise UserError(Problem("run_dir", str(path), "it holds no record of a run", IN_THE_WAY))
            open_to_append(path).close()  # refuses what is no file of its own, before that is replaced
            kept = [f"{json.dumps(record)}\n" for record in records if record["step"] <= last_step]
            write_atomically(path, "".join(kept).encode())
        path.parent.mkdir(exist_ok=True)
        file = open_to_append(path)
        if path.read_bytes()[-1:] not in (b"", b"\n"):
            file.write("\n")  # what a killed run had begun stays a line of its own
        return file
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise UserError(Problem("run_dir", str(path), rule, of_system(error, IN_THE_WAY))) from error

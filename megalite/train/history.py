"""The record of a run: its files and their kinds of lines, how they are written and read, and a log of each rank.

Rank 0 writes metrics.jsonl, events.jsonl and pipeline.jsonl, one JSON object a line. They are the interface: every view
(terminal, report, trackers) is given the same records, in the same order. metrics.jsonl holds every step once
(Meter.line) and evaluations (with `val_loss`). events.jsonl is the run's history: a resume cuts nothing of it, so a
step may stand in it more than once, and of two samples of one step and prompt the later counts. An event:

    {"time": 1790000000.123, "step": 12, "kind": "skipped", "loss": NaN, "grad_norm": NaN, "loss_scale": null}

The kinds, and what else they tell:

    start, resume                how and where the run was started: command, versions, layout, hosts
    skipped                      a step whose loss or gradient was not finite
    skipped_on_request           a step of train.skip_steps
    empty                        a step of whose batch no token enters the loss
    checkpoint                   bytes, seconds, and stall_s of them without training
    checkpoint_failed            message
    ranks                        of each rank: memory_gib at its peak, compute_s of a step without waiting for others
    straggler                    rank, host, how many times as long as its equals it computes, share of a step lost
    sample                       prompt, text
    profile                      folder
    record_changed               message: a file of the record is not as it was written
    stopped, finished, failed    how a start ended, by what, with which message

A line that is no record of the right types is named and left out. The last line without its end is what a killed run
had begun, and is left out in silence. Nothing here imports torch.
"""

import faulthandler
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO, get_args

import xxhash

from megalite.config.files import fits, open_to_append, read_bytes, write_atomically
from megalite.errors.problems import Problem, UserError, printable
from megalite.errors.words import of_system

if TYPE_CHECKING:
    from megalite.train.setup import Job

Record = dict[str, Any]
Note = Callable[[str], object]  # prints a line for the user
StepPart = Literal["data", "forward", "backward", "exchange", "communication", "optimizer", "other"]  # of a step's time
STEP_PARTS: tuple[StepPart, ...] = get_args(StepPart)
METRICS, EVENTS, PIPELINE = "metrics.jsonl", "events.jsonl", "pipeline.jsonl"
ENDS = ("stopped", "finished", "failed")
NOT_LOGGED = ("start", "resume", "ranks", "sample")  # kinds of events that are long
NEEDED = {  # by kind of event: what its readers compute with
    "checkpoint": ("bytes", "seconds", "stall_s"),
    "ranks": ("memory_gib", "compute_s"),
    "straggler": ("rank", "host", "times"),
    "sample": ("prompt", "text"),
}
TYPES: dict[str, Any] = {  # of values, by name; all others of a line of metrics are numbers
    **dict.fromkeys(("time", "seconds", "stall_s", "times", "share", "loss", "grad_norm"), float),
    **dict.fromkeys(("step", "tokens", "bad_steps", "bytes", "rank", "ranks_per_node", "status"), int),
    **dict.fromkeys(("kind", "host", "prompt", "text", "message", "folder", "command", "device", "by"), str),
    **dict.fromkeys(("overrides", "hosts", "changes"), list[str]),
    **dict.fromkeys(("memory_gib", "compute_s"), float | list[float]),
    **dict.fromkeys(("mfu", "mfu_causal", "val_bits_per_byte", "loss_scale"), float | None),  # where it is known
    "versions": dict[str, str],
    "time_split": dict[str, float],
    "moe": dict[str, float | list[list[int]]],
    "cuts": dict[str, int],
    "about": list[list[str]],
    "layout": dict[str, Any],
}
LATEST = 1e11  # seconds since 1970: later times have no date
IN_THE_WAY = "move it away (the checkpoints are not touched by that), or set another run_dir"


def _is_metrics(found: Record) -> bool:
    is_record = "step" in found and ("loss" in found or "val_loss" in found)
    return is_record and all(fits(value, TYPES.get(name, float)) for name, value in found.items())


def _is_event(found: Record) -> bool:
    needed = {"time", "step", "kind", *NEEDED.get(str(found.get("kind")), ())}
    is_event = needed <= found.keys() and all(fits(value, TYPES.get(name, Any)) for name, value in found.items())
    return is_event and 0 <= found["time"] < LATEST and all(len(row) == 2 for row in found.get("about", ()))


def _finite(text: str, kind: type = float) -> Any:
    """A number as JSON writes it. Infinity is written as such: 1e400 is none of ours."""
    if isinf(float(text)):
        raise ValueError
    return kind(text)


def _read(is_record: Callable[[Record], bool], path: Path, note: Note = lambda text: None) -> list[Record]:
    """The records of a file, none where there is no file; `note` gets a line about lines that are none."""
    records, bad = list[Record](), list[str]()
    lines = read_bytes(path, IN_THE_WAY).split(b"\n")[:-1] if os.path.lexists(path) else []
    for number, line in enumerate(lines, 1):
        found = None
        with suppress(ValueError, RecursionError):
            found = json.loads(line, parse_float=_finite, parse_int=partial(_finite, kind=int))
        if isinstance(found, dict) and is_record(found):
            records.append(found)
        elif line:
            bad.append(str(number))
    if bad:
        note(f"{path}: no valid record in line {', '.join(bad[:9])}{', ...' * (len(bad) > 9)}; left out")
    return records


read_metrics, read_events = partial(_read, _is_metrics), partial(_read, _is_event)


class Seals:
    """Bytes and hash of the files of the record in a run's folder, by name: a checkpoint keeps them. A call reads what
    the files have gained since the call before."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._bytes = folder, dict.fromkeys((METRICS, EVENTS), 0)
        self._hashes = {name: xxhash.xxh3_128() for name in self._bytes}

    def __call__(self) -> dict[str, Record]:
        for name, hashed in self._hashes.items():
            with suppress(OSError), open(self._folder / name, "rb") as file:  # no record is worth the run
                file.seek(self._bytes[name])
                hashed.update(gained := file.read())
                self._bytes[name] += len(gained)
        return {name: {"bytes": self._bytes[name], "hash": self._hashes[name].hexdigest()} for name in self._hashes}


def changes(folder: Path, sealed: Mapping[str, Any], step: int) -> list[str]:
    """Files of a run folder that are not as the checkpoint of `step` has `sealed` them, in words."""
    words = []
    for name, seal in sealed.items():
        content = read_bytes(folder / name, IN_THE_WAY)[: seal["bytes"]] if (folder / name).exists() else b""
        if xxhash.xxh3_128_hexdigest(content) != seal["hash"]:
            lost = seal["bytes"] - len(content)
            words.append(
                f"{name} {f'has lost {lost:,} bytes' if lost else 'was changed'} after it was written, before the end "
                f"of step {step:,}: its metrics may be wrong, training is not affected. A copy can take its place"
            )
    return words


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


class View(Protocol):
    """Shows a run on rank 0: the terminal, the report, trackers."""

    name: str  # by which an error of the view is reported, once until it works again

    def add(self, record: Record) -> None:
        """The record is in its file. The last one of a run is an event of a kind in ENDS, with the exit status; a run
        that another job has taken over has none."""

    def close(self) -> None:
        """No more records will come. May be repeated."""


class RunLog:
    """The record of a run on one rank. What cannot be written (a full disk) is reported once, until it can be written
    again; it never ends the run."""

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
        for text in (f"{place}, {context.device}, {context.dtype}", *self._early):
            self.write(text)
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
        self.write(text)
        self._say(text)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Record what happened now, after `step`."""
        if kind not in NOT_LOGGED:
            words = ", ".join(f"{name} {value}" for name, value in fields.items())
            self.write(f"step {step}: {kind}{f': {words}' if words else ''}")
        self.add({"time": round(time.time(), 3), "step": step, "kind": kind, **fields})

    def add(self, record: Record) -> None:
        """Keep a record and show it."""
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

    def write(self, text: str, level: str = "INFO") -> None:
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

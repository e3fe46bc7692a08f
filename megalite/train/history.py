"""The record of a run: its files and their kinds of lines, how they are written and read, and a log of each rank.

Rank 0 writes metrics.jsonl, events.jsonl and pipeline.jsonl, one JSON object a line. They are the interface: every view
(terminal, report, trackers) is given the same records, in the same order. metrics.jsonl holds every step once
(Meter.line) and evaluations (`is_evaluation`). events.jsonl is the run's history: a resume cuts nothing of it, so a
step may stand in it more than once, and of two samples of one step and prompt the later counts. An event:

    {"time": 1790000000.123, "step": 12, "kind": "skipped", "loss": NaN, "grad_norm": NaN, "loss_scale": null}

The kinds, and what else they tell:

    start, resume                how and where the run was started: command, versions, layout, hosts
    phase                        epochs of its sources by name so far, and a message that says what changes
    skipped                      a step whose loss or gradient was not finite; arose_in, ranks (origin.py)
    spike                        a step that train.skip_spikes did not apply
    rolled_back                  checkpoint: its step; message: which steps and samples are passed over
    skipped_on_request           a step of train.skip_steps
    empty                        a step of whose batch no token enters the loss
    checkpoint                   bytes, seconds, and stall_s of them without training
    checkpoint_failed            message
    uploaded                     bytes, seconds; its step is that of the checkpoint
    upload_failed                message: why that checkpoint is not uploaded, or not yet
    ranks                        of each rank: memory_gib at its peak, compute_s of a step without waiting for others
    straggler                    rank, host, how many times as long as its equals it computes, share of a step lost
    sample                       prompt, text
    profile                      folder
    record_changed               message: a file of the record is not as it was written
    settings_changed             settings that training itself has changed, and a message that says why
    stopped, finished, failed    how a start ended, by what, with which message; medians over steps (Meter.medians)

A line that is no record of the right types is named and left out. The last line without its end is what a killed run
had begun, and is left out in silence. Nothing here imports torch.
"""

import faulthandler
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

import xxhash

from megalite.config.files import STATUS, absolute, fits, open_to_append, read_bytes, write_atomically
from megalite.errors.problems import REMEDIES, Problem, UserError, printable

if TYPE_CHECKING:
    from megalite.train.loop import Job

Record = dict[str, Any]
# Shows a run on rank 0 (terminal, report, trackers): called with each record once it is in its file. The last record of
# a run is an event of a kind in ENDS, with the exit status; a run that another job has taken over has none.
View = Callable[[Record], object]
Note = Callable[[str], object]  # prints a line for the user
StepPart = Literal["data", "forward", "backward", "exchange", "communication", "optimizer", "other"]  # of a step's time
STEP_PARTS: tuple[StepPart, ...] = get_args(StepPart)
METRICS, EVENTS, PIPELINE = "metrics.jsonl", "events.jsonl", "pipeline.jsonl"
ENDS = ("stopped", "finished", "failed")
NOT_LOGGED = ("start", "resume", "ranks", "sample")  # kinds of events that are long
LAYER_NORMS = ["activation_rms", "gradient_rms"]
UPDATE_SIZES = [f"{of}{size}" for of in ("", "group_") for size in ("update_rms", "update_norm", "weight_rms")]
NEEDED = {  # by kind of event: what its readers compute with
    "checkpoint": ("bytes", "seconds", "stall_s"),
    "uploaded": ("bytes", "seconds"),
    "ranks": ("memory_gib", "compute_s"),
    "straggler": ("rank", "host", "times"),
    "sample": ("prompt", "text"),
    "settings_changed": ("settings",),
}
TYPES: dict[str, Any] = {  # of values, by name; all others of a line of metrics are numbers
    **dict.fromkeys(("time", "seconds", "stall_s", "times", "share", "loss", "grad_norm"), float),
    **dict.fromkeys(("step", "tokens", "bad_steps", "bytes", "rank", "ranks_per_node", "status"), int),
    **dict.fromkeys(("kind", "host", "prompt", "text", "message", "folder", "command", "device", "by"), str),
    **dict.fromkeys(("overrides", "hosts", "changes"), list[str]),
    **dict.fromkeys(("memory_gib", "compute_s"), float | list[float]),
    **dict.fromkeys(("mfu", "mfu_causal", "val_bits_per_byte", "loss_scale"), float | None),  # where it is known
    "versions": dict[str, str],
    **dict.fromkeys(
        ("time_split", "layer_attention_logit", "source_loss", "epochs", *UPDATE_SIZES, *LAYER_NORMS), dict[str, float]
    ),
    "moe": dict[str, float | list[list[int]]],
    **dict.fromkeys(("cuts", "source_tokens"), dict[str, int]),
    "about": list[list[str]],
    "validation": dict[str, dict[str, float | None]],
    **dict.fromkeys(("layout", "settings"), dict[str, Any]),
}
LATEST = 1e11  # seconds since 1970: later times have no date
NAMED, DIGITS = 9, 20  # lines that are no records, and what a whole number has at most
IN_THE_WAY = "move it away (the checkpoints are not touched by that), or set another run_dir"


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics is of an evaluation, not of a step."""
    return "val_loss" in line or "validation" in line


def _is_metrics(found: Record) -> bool:
    is_record = "step" in found and ("loss" in found or is_evaluation(found))
    return is_record and all(fits(value, TYPES.get(name, float)) for name, value in found.items())


def _is_event(found: Record) -> bool:
    needed = {"time", "step", "kind", *NEEDED.get(str(found.get("kind")), ())}
    is_event = needed <= found.keys() and all(fits(value, TYPES.get(name, Any)) for name, value in found.items())
    return is_event and 0 <= found["time"] < LATEST and all(len(row) == 2 for row in found.get("about", ()))


def _finite(text: str) -> float:
    """A number as JSON writes it. Infinity is written as such: 1e400 is none of ours."""
    if isinf(number := float(text)):
        raise ValueError
    return number


def _count(text: str) -> int:
    """A whole number that sums and products of readers hold, too."""
    if len(text) > DIGITS:
        raise ValueError
    return int(text)


def _read(is_record: Callable[[Record], bool], path: Path, note: Note = lambda text: None) -> list[Record]:
    """The records of a file, none where there is no file; `note` gets a line about lines that are none."""
    records, bad = list[Record](), list[str]()
    lines = read_bytes(path, IN_THE_WAY).split(b"\n")[:-1] if os.path.lexists(path) else []
    for number, line in enumerate(lines, 1):
        found = None
        with suppress(ValueError, RecursionError):
            found = json.loads(line, parse_float=_finite, parse_int=_count)
        if isinstance(found, dict) and is_record(found):
            records.append(found)
        elif line:
            bad.append(str(number))
    if bad:
        more = f", ... ({len(bad):,} lines in all)" if len(bad) > NAMED else ""
        note(f"{path}: no valid record in line {', '.join(bad[:NAMED])}{more}; left out")
    return records


read_metrics, read_events = partial(_read, _is_metrics), partial(_read, _is_event)


def examine_records(job: "Job") -> tuple[int, bool, Record]:
    """The step that the run continues from if the records hold its evaluation, else -1; whether this start has nothing
    to do and nothing to record; the newest line of a step. UserError where the run has saved and its checkpoints are
    gone: a new start would write over its records."""
    step, folder = job.progress.step, job.folder.path
    lines, events = read_metrics(folder / METRICS), read_events(folder / EVENTS)
    if job.resumed_from is None:
        saved = [f"a checkpoint of step {it['step']}" for it in events if it["kind"] in ("checkpoint", "resume")]
        if saved or (lines and not events):
            missing = f"there is no folder called step- and eight digits in {job.folder.checkpoints}"
            rule = f"its record tells of {saved[-1] if saved else 'steps'}, but {missing}"
            remedy = f"put the checkpoints back (is their disk mounted?), set another run_dir, or delete {folder}"
            raise UserError(Problem("run_dir", str(folder), rule, remedy))
        return -1, False, {}
    job.evaluated_step = step if any(line["step"] == step and is_evaluation(line) for line in lines) else -1
    finished = job.complete and bool(events) and events[-1]["kind"] in ENDS
    measured = [line for line in lines if "loss" in line and line["step"] <= step]
    return job.evaluated_step, finished, measured[-1] if measured else {}


def seals(folder: Path) -> Iterator[dict[str, Record]]:
    """Bytes and hash of the files of the record in a run's folder, by name: for one checkpoint after the other. Only
    what the files have gained since the checkpoint before is read."""
    hashes, sizes = {name: xxhash.xxh3_128() for name in (METRICS, EVENTS)}, Counter[str]()
    while True:
        for name, hashed in hashes.items():
            with suppress(OSError), open(folder / name, "rb") as file:  # no record is worth the run
                file.seek(sizes[name])
                hashed.update(gained := file.read())
                sizes[name] += len(gained)
        yield {name: {"bytes": sizes[name], "hash": hashed.hexdigest()} for name, hashed in hashes.items()}


def changes(folder: Path, sealed: Mapping[str, Any], step: int) -> list[str]:
    """Files of a run folder that are not as the checkpoint of `step` has `sealed` them, in words."""
    words = []
    for name, seal in sealed.items():
        content = read_bytes(folder / name, IN_THE_WAY)[: seal["bytes"]] if (folder / name).exists() else b""
        if xxhash.xxh3_128_hexdigest(content) != seal["hash"]:
            when = f"after it was written, before the end of step {step:,}"
            words.append(f"{name} was changed {when}: it may show wrong numbers, training is not affected")
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
        raise UserError(Problem("run_dir", str(path), rule, REMEDIES.get(error.errno, IN_THE_WAY))) from error


class RunLog:
    """The record of a run on one rank. What cannot be written (a full disk) is reported once, until it can be written
    again; it never ends the run."""

    def __init__(self, say: Note) -> None:
        """`say` prints a line for the user, on rank 0."""
        self._say = say
        self._early: list[str] = []  # notes until the run folder is known
        self._log: TextIO | None = None
        self._files: dict[str, TextIO] = {}  # by name; empty on other ranks
        self._views: Mapping[str, View] = {}
        self._failing: set[str] = set()  # names of files and views that do not work now

    def open(self, job: "Job", open_views: Callable[["Job", Note], Mapping[str, View]]) -> None:
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
        self._files = {METRICS: open_record(folder / METRICS, self.note, last_step=step)}
        names = [EVENTS, *([PIPELINE] if job.config.train.record_pipeline else [])]
        self._files |= {name: open_record(folder / name) for name in names}
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
        for name, view in self._views.items():
            self._attempt(name, partial(view, record))

    def append(self, name: str, record: Record) -> None:
        """Hand a line of the file `name` to the operating system at once: killing the process does not lose it."""
        if file := self._files.get(name):
            self._attempt(name, lambda: file.write(json.dumps(record) + "\n"))

    def close(self) -> None:
        """No more records will come. May be called without `open`."""
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


class StatusFile:
    """Tells the script that started this job what has become of it: a file of one JSON object, at launch.status_file.

        {"state": "stopped", "step": 1200, "steps": 5000, "run_dir": "/scratch/run", "by": "SIGUSR1"}

    `running`: training, or killed; `stopped`: saved, to be started again; `finished`: nothing remains; `failed`: look
    at the log. `step` is the newest that is saved. A start that ends before it has built its model writes nothing.
    For a batch script that says when the job began: steps that this start has `gained`, `start_up_s` from then on, and
    `step_s`, the mean of these steps with saves and evaluations, null before the first save.
    """

    def __init__(self, path: str | None, run_dir: str, job_began: int | None, steps: int = 0) -> None:
        """`steps` may be set later, before the first state is written."""
        self._path, self._run_dir, self.steps = Path(absolute(path)) if path else None, run_dir, steps
        self._job_began = job_began
        self.state, self._first, self._step, self._trains_s = "", 0, 0, 0.0

    def write(self, state: str, step: int | None = None, by: str | None = None) -> None:
        """The state from now on, and the step if one was saved. UserError where the first one cannot be written."""
        begins, self.state, self._step = not self.state, state, self._step if step is None else step
        if begins:
            self._first, self._trains_s = self._step, time.time()
        if self._path is None:
            return
        status = {"state": state, "step": self._step, "steps": self.steps, "run_dir": self._run_dir}
        status |= {"by": by} if by else {}
        if self._job_began is not None:
            gained = self._step - self._first
            status |= {"gained": gained, "start_up_s": round(self._trains_s - self._job_began, 1)}
            status["step_s"] = round((time.time() - self._trains_s) / gained, 3) if gained else None
        try:
            write_atomically(self._path, (json.dumps(status) + "\n").encode(), STATUS)
        except OSError as error:
            if begins:  # later the script sees the old state, and the run is saved
                self.state, remedy = "", "a file in a folder where you may write, on a disk with room"
                raise UserError(Problem("launch.status_file", str(self._path), f"{error.strerror}", remedy)) from error

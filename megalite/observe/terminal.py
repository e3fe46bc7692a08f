"""Shows a run to its user: a header, a line of numbers for every shown step, and a summary.

The lines have at most 100 columns, under column names that are repeated. A stream that can no longer be written to (a
closed pipe, a full disk) costs lines: a run does not end because nobody looks at it.
"""

import math
import shlex
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from textwrap import wrap
from typing import Any, TextIO

import numpy as np

from megalite.config.step_plan import HORIZONS
from megalite.errors.problems import printable, several
from megalite.observe import readable
from megalite.observe.readable import print_lines
from megalite.observe.run_data import RunData
from megalite.train.history import ENDS, is_evaluation

NAMES_EVERY = 20  # lines between two lines of column names
PREPARING_S = 10  # seconds between two lines about the preparation of data
NOTED = (
    *("phase", "skipped", "spike", "rolled_back", "skipped_on_request", "empty", "straggler", "profile"),
    *("checkpoint_failed", "upload_failed", "settings_changed"),
)
COLUMNS: tuple[tuple[str, str, int, Callable[[float], str]], ...] = (  # of a step: record's name, title, width, text
    ("loss", "loss", 8, readable.loss),
    ("lr", "lr", 8, "{:.2e}".format),
    ("grad_norm", "grad_norm", 9, readable.loss),
    ("tokens_per_s", "tokens/s", 8, readable.rate),
    ("step_time_s", "time", 8, lambda seconds: readable.step_time(seconds).replace(" ", "")),
    ("memory_gib", "GiB", 6, "{:.2f}".format),
    ("data_wait_share", "wait", 5, readable.percent),
    ("mfu", "mfu", 5, readable.percent),
    ("imbalance_max", "imbalance", 9, "{:.2f}".format),
)


class Terminal:
    """Shows a run to who started it: `add` is a view (train/history.py). Ranks that do not print pass enabled=False."""

    def __init__(self, stream: TextIO, *, enabled: bool = True) -> None:
        self._stream, self._enabled = stream, enabled
        self._step_times = deque[float](maxlen=50)
        self._columns = list(COLUMNS)
        self._printed = 0  # steps
        self._known_slow: set[int] = set()  # ranks that were named
        self.preparing = data_work(self, "preparing data", "prepared")
        self.checking = data_work(self, "checking tokens", "checked")  # a token file is scanned

    def follow(self, run: RunData, title: str) -> None:
        """Show the records of a run from now on. `run` holds a record before it is shown."""
        self._run, self._title, self._steps, self._began = run, title, run.steps, time.monotonic()

    def add(self, record: Mapping[str, Any]) -> None:
        """Show a record, if the user wants to know."""
        kind, step = record.get("kind"), record["step"]
        if kind is None and is_evaluation(record):
            took = readable.step_time(record["eval_time_s"])
            self.print(f"step {step}  validation loss {measures(record)}  ({took})", *of_sets(record))
        elif kind is None:
            self._step(record)
        elif kind in ("start", "resume"):
            self.print(f"megalite  {self._title}", *_rows(record["about"]), "")
        elif kind == "sample" and step < self._steps:  # else the summary shows it
            self.print(f"step {step}  the model writes", *_quoted(record["prompt"] + record["text"]))
        elif kind in NOTED and record.get("rank") not in self._known_slow:
            self.print(f"step {step}, {kind.replace('_', ' ')}: {readable.words_of(record)}".rstrip(": "))
        elif kind in ENDS and kind != "failed":
            self._finish(record.get("by"))
        self._known_slow |= {record["rank"]} if kind == "straggler" else set()

    def print(self, *lines: str) -> None:
        """Show lines: a warning, a checkpoint that was passed over."""
        with suppress(OSError):
            print_lines(lines if self._enabled else (), self._stream)

    def _step(self, record: Mapping[str, Any]) -> None:
        step, values = record["step"], {**record, **(record.get("moe") or {})}
        self._step_times.append(record["step_time_s"])
        if not self._printed:  # a first step that was skipped does not say that there are experts
            known = {name for name, value in values.items() if value is not None}
            known |= {"imbalance_max"} if self._run.config.get("model.moe.num_experts") else set()
            self._columns = [column for column in COLUMNS if column[0] in known]
        # How long the rest takes: by a median, which one slow step (a compilation) does not move.
        left = readable.duration(statistics.median_low(self._step_times) * (self._steps - step)).replace(" ", "")
        digits = len(str(self._steps))
        cells = [("step", max(9, 2 * digits + 1), f"{step:>{digits}}/{self._steps}")]
        for name, title, width, words in self._columns:
            cells.append((title, width, "-" if values.get(name) is None else words(values[name])))
        cells.append(("left", 8, left))
        names, row = (" ".join(f"{cell[at]:>{cell[1]}}" for cell in cells) for at in (0, 2))
        self.print(*([names] if self._printed % NAMES_EVERY == 0 else []), row)
        self._printed += 1

    def _finish(self, stopped_by: str | None) -> None:
        """Show the summary, and the next thing that a user can do."""
        run, command = self._run, self._run.start.get("command", "python pretrain_gpt.py")
        how = "finished:" if stopped_by is None else f"stopped by {stopped_by} after"
        learned = what_was_learned(run, time.monotonic() - self._began)
        self.print("", f"{how} {run.step:,} of {several(self._steps, 'step')}", *_rows(learned), "")
        train, validation = (np.array(run.series[name].points()).reshape(-1, 4) for name in ("loss", "val_loss"))
        if len(train) > 1 and (self._stream.encoding or "utf-8").lower().startswith("utf"):
            self.print("loss: training as a line, validation as ●", *curve(train[:, :2], validation[:, :2]), "")
        for prompt, text in run.samples.get(run.step, {}).items() if stopped_by is None else ():
            self.print("the model writes", *_quoted(prompt + text), "")
        longer = [word for word in shlex.split(command) if word.partition("=")[0] not in HORIZONS]
        rows = [("run folder", str(run.folder))]
        if stopped_by is not None:
            rows.append(("continue", f"{command}   (the same command)"))
        elif not run.config.get("phases"):  # whose shares would be of other steps
            rows.append(("train longer", shlex.join([*longer, f"train.steps={2 * max(run.steps, 1)}"])))
        self.print(*_rows(rows))


def data_work(terminal: Terminal, doing: str, done: str) -> Callable[[int, int, int, int], None]:
    """A function to call often, with bytes done and in all, documents and tokens: it tells how far the work is."""
    began = shown = 0.0

    def show(bytes_done: int, bytes_total: int, documents: int, tokens: int) -> None:
        nonlocal began, shown
        now = time.monotonic()
        began, shown = began or now, shown or now
        counts, total = f"{several(documents, 'document')}, {tokens:,} tokens", readable.size(bytes_total)
        if bytes_done >= bytes_total > 0:
            if shown < math.inf:
                terminal.print(f"{done} {total}: {counts} in {readable.duration(now - began)}")
            shown = math.inf
        elif now - shown >= PREPARING_S:
            shown, of = now, f" of {total}" if bytes_total else ""
            terminal.print(f"{doing}: {readable.size(bytes_done)}{of}, {counts}")

    return show


def what_was_learned(run: RunData, seconds: float) -> list[tuple[str, str]]:
    """Rows of the summary. `seconds`: of this start."""
    last, speed = run.last, f"{readable.rate(run.last.get('mean_tokens_per_s', 0.0))} tokens/s"
    if "median_step_time_s" in (end := run.end or {}):
        steady = readable.rate(end["median_tokens_per_s"]), readable.step_time(end["median_step_time_s"])
        speed = "{} tokens/s, {} a step (medians); over all steps {}".format(*steady, speed)
    rows = [("time", readable.duration(seconds)), ("speed", speed), ("tokens seen", f"{last.get('tokens', 0):,}")]
    first, first_validation = (readable.loss(run.series[name].first) for name in ("loss", "val_loss"))
    if last:
        rows.append(("training loss", f"{first} -> {readable.loss(last['loss'])}"))
    if "val_loss" in run.evaluation:
        best = f"best {readable.loss(run.best[0])} at step {run.best[1]}"
        rows.append(("validation loss", f"{first_validation} -> {measures(run.evaluation)}, {best}"))
    for name, its in run.evaluation.get("validation", {}).items():
        at_first = readable.loss(run.series[f"val_loss/{name}"].first)
        rows.append((f"on {name}", f"{at_first} -> {readable.loss(its['loss'])}"))
    if bad := last.get("bad_steps"):
        rows.append(("bad steps", f"{bad}, not applied"))
    return rows


def measures(evaluation: Mapping[str, Any]) -> str:
    """The loss of an evaluation, and what else is known of it."""
    names = {"val_loss": "", "val_perplexity": ", perplexity ", "val_bits_per_byte": ", bits per byte "}
    names["val_loss_ema"] = ", of averaged weights "
    known = {name: evaluation[name] for name in names if evaluation.get(name) is not None}
    return "".join(f"{names[name]}{readable.loss(value)}" for name, value in known.items()) or "by set"


def of_sets(evaluation: Mapping[str, Any]) -> list[str]:
    """Lines with the loss on each set of data.validation."""
    words = [f"{name} {readable.loss(its['loss'])}" for name, its in evaluation.get("validation", {}).items()]
    return wrap(", ".join(words), 100, initial_indent="  on ", subsequent_indent="     ")


def curve(train: Any, validation: Any, width: int = 72, height: int = 10) -> list[str]:
    """The losses [points, 2] over the steps as lines of text. A character of the line has one of four heights."""
    (first, low), (last, high) = (extreme([*train, *validation], axis=0) for extreme in (np.min, np.max))
    scale, sums = (high - low or 1) / height, np.histogram(train[:, 0], width, (first, last), weights=train[:, 1])[0]
    counts = np.histogram(train[:, 0], width, (first, last))[0]
    known, cells = counts > 0, [[" "] * width for _ in range(height)]
    line = np.interp(range(width), np.flatnonzero(known), sums[known] / counts[known], math.nan, math.nan)
    for column, row in enumerate((high - line) / scale):
        if math.isfinite(row):
            cells[min(int(row), height - 1)][column] = "⠉⠒⠤⣀"[int(4 * row) % 4 if row < height else 3]
    for step, loss in validation:
        column = int((step - first) / (last - first or 1) * width)
        cells[min(int((high - loss) / scale), height - 1)][min(column, width - 1)] = "●"
    labels = {0: readable.loss(high), height - 1: readable.loss(low)}
    rows = [f"{labels.get(at, ''):>8} │{''.join(row)}".rstrip() for at, row in enumerate(cells)]
    return [*rows, f"{'':8} └{'─' * width}", f"{'':10}{first:<{width - 10}.0f}{last:>10.0f}"]


def _rows(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {label:<15}  {text}" for label, text in rows]


def _quoted(text: str) -> list[str]:
    return [f"  | {line.expandtabs(4)}" for line in printable(text).splitlines()]

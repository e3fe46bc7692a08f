"""Shows a run to its user: a header, the newest numbers under a progress bar or as aligned lines, and a summary.

On a terminal the numbers of the newest step stand below a progress bar and evaluations scroll past above it; anywhere
else (a SLURM log, a pipe) every shown step is one line of at most 100 columns, under column names that are repeated.
"""

import math
import os
import shlex
import statistics
import textwrap
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TextIO

import numpy as np

from megalite.errors.problems import printable
from megalite.errors.words import several
from megalite.observe import readable
from megalite.observe.run_data import Bucket, RunData
from megalite.observe.screens import WIDTH, Line, Screen
from megalite.train.history import ENDS

NAMES_EVERY = 20  # lines of a log between two lines of column names
PREPARING_LOG_S = 10  # seconds between two lines of a log about the preparation of data
LABEL, QUIET = "bold cyan", "dim"
NOTED = ("skipped", "skipped_on_request", "empty", "straggler", "profile")  # kinds of events
Rows = Sequence[Sequence[str]]  # label and text
COLUMNS: tuple[tuple[str, str, int, Callable[[float], str]], ...] = (  # of a step: record's name, title, width, text
    ("loss", "loss", 8, readable.loss),
    ("lr", "lr", 8, "{:.2e}".format),
    ("grad_norm", "grad_norm", 9, readable.loss),
    ("tokens_per_s", "tokens/s", 8, readable.rate),
    ("step_time_s", "time", 8, lambda seconds: readable.step_time(seconds).replace(" ", "")),
    ("memory_gib", "GiB", 6, readable.gibibytes),
    ("data_wait_share", "wait", 5, readable.percent),
    ("mfu", "mfu", 5, readable.percent),
    ("imbalance_max", "imbalance", 9, "{:.2f}".format),
)
LEARNING = 3  # columns that say how well the model does; the others say how fast


class Terminal:
    """The view of a run for who started it (train/run_log.py). Ranks that do not print pass enabled=False."""

    name = "terminal"
    _run: RunData  # from `follow` on

    def __init__(self, stream: TextIO, *, interactive: bool, enabled: bool = True) -> None:
        live = interactive and enabled and os.environ.get("TERM") != "dumb"
        self._screen = Screen(stream, live=live, silent=not enabled)
        self._began, self._title, self._steps = time.monotonic(), "", 1
        self._step_times = deque[float](maxlen=50)
        self._columns = list(COLUMNS)
        self._printed = 0  # steps
        self._validation = ""
        self._known_slow: set[int] = set()  # ranks that were named
        # How far the preparation of data, or the scan of a token file, is; may be called often.
        self.preparing = DataWork(self._screen, "preparing data", "prepared").show
        self.checking = DataWork(self._screen, "checking tokens", "checked").show

    def follow(self, run: RunData, title: str) -> None:
        """Show the records of a run from now on. `run` holds a record before it is shown."""
        self._run, self._title, self._steps, self._began = run, title, run.steps, time.monotonic()

    def add(self, record: Mapping[str, Any]) -> None:
        """Show a record, if the user wants to know."""
        kind, step = record.get("kind"), record["step"]
        if kind is None:
            (self._evaluation if "val_loss" in record else self._step)(record)
        elif kind in ("start", "resume"):
            self._screen.print([("megalite", LABEL), (f"  {self._title}", "bold")], *self._rows(record["about"]), [])
            self._screen.status(self._bar(step), [("waiting for the first step", QUIET)], now=True)
        elif kind == "checkpoint_failed":
            self.note(f"warning: {readable.words_of(record)}")
        elif kind == "sample" and step < self._steps:  # else the summary shows it
            self._screen.print([(f"step {step}", "bold"), ("  the model writes", QUIET)])
            self._screen.print(*self._quoted(record["prompt"] + record["text"]))
        elif kind in NOTED and record.get("rank") not in self._known_slow:
            self.note(f"step {step}: {readable.words_of(record)}")
        elif kind in ENDS and kind != "failed":
            self._finish(record.get("by"))
        self._known_slow |= {record["rank"]} if kind == "straggler" else set()

    def note(self, text: str) -> None:
        """Show a line: a warning, a checkpoint that was passed over."""
        self._screen.print(*[[(line, "yellow")] for line in text.splitlines()])

    def close(self) -> None:
        """Leave the terminal as it was; also after an error. May be repeated."""
        self._screen.close()

    def _step(self, record: Mapping[str, Any]) -> None:
        step, values = record["step"], {**record, **(record.get("moe") or {})}
        self._step_times.append(record["step_time_s"])
        if not self._printed:
            self._columns = [it for it in COLUMNS if values.get(it[0]) is not None or self._has_experts(it[0])]
        self._printed += 1
        found = [(values.get(key), words) for key, _, _, words in self._columns]
        cells = ["-" if value is None else words(value) for value, words in found]
        if self._screen.live:
            named = [(title, cell) for (_, title, _, _), cell in zip(self._columns, cells, strict=True)]
            learning = [*named[:LEARNING], ("validation", self._validation), ("bad steps", f"{record['bad_steps']:,}")]
            lines = [[it for it in line if it[1] not in ("", "0")] for line in (learning, named[LEARNING:])]
            self._screen.status(self._bar(step), *map(_in_spans, lines), now=step == self._steps)
            return
        digits = len(str(self._steps))
        widths = [max(9, 2 * digits + 1), *(width for _, _, width, _ in self._columns), 8]
        gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
        names = ["step", *(title for _, title, _, _ in self._columns), "left"]
        rows = [(names, "bold")] if self._printed % NAMES_EVERY == 1 else []
        rows.append(([f"{step:>{digits}}/{self._steps}", *cells, self._left(step).replace(" ", "")], ""))
        for row, style in rows:
            self._screen.print([(gap.join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)), style)])

    def _has_experts(self, column: str) -> bool:
        """Whether the column is that of experts, and the model has some: a first step that was skipped does not say."""
        return column == "imbalance_max" and bool(self._run.config.get("model.moe.num_experts"))

    def _evaluation(self, record: Mapping[str, Any]) -> None:
        self._validation = f"{readable.loss(record['val_loss'])} (step {record['step']})"
        loss, *others = measures(record)
        spans = [(f"step {record['step']}", "bold"), ("  validation loss ", QUIET), (loss, "bold green")]
        self._screen.print([*spans, (f"{''.join(others)}  ({readable.step_time(record['eval_time_s'])})", "")])

    def _finish(self, stopped_by: str | None) -> None:
        """Show the summary."""
        self._screen.close()
        run = self._run
        how = "finished:" if stopped_by is None else f"stopped by {stopped_by} after"
        head = f"{how} {run.step:,} of {several(self._steps, 'step')}"
        learned = what_was_learned(run, time.monotonic() - self._began)
        self._screen.print([], [(head, "bold")], *self._rows(learned), [])
        train, validation = (run.series[name].buckets for name in ("loss", "val_loss"))
        if len(train) > 1 and self._screen.unicode:
            self._screen.print([("loss: training as a line, validation as ●", QUIET)])
            self._screen.print(*[[(line, "")] for line in (*curve(train, validation), "")])
        for prompt, text in run.samples.get(run.step, {}).items() if stopped_by is None else ():
            self._screen.print([("the model writes", LABEL)], *self._quoted(prompt + text), [])
        self._screen.print(*self._rows([("run folder", str(run.folder)), how_to_go_on(run, stopped_by)]))

    def _rows(self, rows: Rows) -> list[Line]:
        """Labels and texts in two columns. Texts wrap below themselves; a path is never broken."""
        width, lines = max([15, *(len(label) for label, _ in rows)]), list[Line]()
        for label, text in rows:
            room = max(20, self._screen.width - width - 4)
            cut = textwrap.wrap(printable(text), room, break_long_words=False, break_on_hyphens=False) or [""]
            for name, words in zip([label] + [""] * len(cut), cut, strict=False):
                lines.append([(f"  {name:<{width}}", LABEL), (f"  {words}", "")])
        return lines

    def _quoted(self, text: str) -> list[Line]:
        """Lines of a sample, cut to the screen's width, otherwise untouched."""
        width = max(20, self._screen.width - 4)
        lines = [line.expandtabs(4) for line in printable(text).splitlines()]
        cut = [line[at : at + width] for line in lines for at in range(0, max(len(line), 1), width)]
        return [[("  | ", QUIET), (line, "")] for line in cut]

    def _bar(self, step: int) -> Line:
        """The progress bar; its length follows the terminal's width."""
        done = step / self._steps if self._steps else 1.0
        name, passed = f"step {step}/{self._steps} ", readable.duration(time.monotonic() - self._began)
        clock = f" {100 * done:3.0f}%  {passed} passed, {self._left(step)} left"
        return [(name, "bold"), *bar(done, self._screen.width - len(name) - len(clock) - 1), (clock, "")]

    def _left(self, step: int) -> str:
        """How long the rest takes: by a median, which one slow step (a compilation) does not move."""
        pace = statistics.median_low(self._step_times) if self._step_times else math.nan
        return readable.duration(pace * (self._steps - step))


class DataWork:
    """The progress of making or scanning token files. The first call says what was there before."""

    def __init__(self, screen: Screen, doing: str, done: str) -> None:
        self._screen, self._doing, self._done = screen, doing, done
        self._began = self._logged = 0.0
        self._there: int | None = None
        self._finished = False

    def show(self, bytes_done: int, bytes_total: int, documents: int, tokens: int) -> None:
        now = time.monotonic()
        if self._there is None:
            self._there, self._began, self._logged = bytes_done, now, now
        counts, total = f"{several(documents, 'document')}, {tokens:,} tokens", readable.size(bytes_total)
        if bytes_done >= bytes_total > 0:
            self._screen.status(now=True)  # no bar stays behind
            if not self._finished:
                self._screen.print([(f"{self._done} {total}: {counts} in {readable.duration(now - self._began)}", "")])
            self._finished = True
            return
        made, left = bytes_done - self._there, ""
        if made > 0.02 * (bytes_total - self._there) > 0:
            left = f"  {readable.duration((now - self._began) / made * (bytes_total - bytes_done))} left"
        text = f"{readable.size(bytes_done)}{f' of {total}' if bytes_total else ''}, {counts}{left}"
        self._screen.status(
            [(f"{self._doing} ", "bold"), *bar(bytes_done / max(bytes_total, bytes_done, 1), 30)], [(text, QUIET)]
        )
        if not self._screen.live and now - self._logged >= PREPARING_LOG_S:
            self._logged = now
            self._screen.print([(f"{self._doing}: {text}", "")])


def bar(done: float, width: int) -> Line:
    """A bar of `width` characters of which the share `done` is filled."""
    filled = int(max(width, 4) * min(max(done, 0.0), 1.0))
    return [("━" * filled, "green"), ("─" * (max(width, 4) - filled), "bright_black")]


def what_was_learned(run: RunData, seconds: float) -> list[tuple[str, str]]:
    """Rows of the summary. `seconds`: of this start."""
    first, last, newest = run.first, run.last, run.evaluation
    mean, rate = (readable.rate(last.get(name, 0.0)) for name in ("mean_tokens_per_s", "tokens_per_s"))
    rows = [
        ("time", readable.duration(seconds)),
        ("speed", f"{mean} tokens/s, in the newest steps {rate}"),
        ("tokens seen", readable.count(last.get("tokens", 0))),
    ]
    if last:
        rows.append(("training loss", f"{readable.loss(first['loss'])} -> {readable.loss(last['loss'])}"))
    if newest:
        best = "" if run.best is None else f", best {readable.loss(run.best[1])} at step {run.best[0]}"
        rows.append(("validation loss", f"{readable.loss(first['val_loss'])} -> {''.join(measures(newest))}{best}"))
    if bad := last.get("bad_steps"):
        rows.append(("bad steps", f"{bad}, not applied: loss or gradient was not finite"))
    return rows


def measures(evaluation: Mapping[str, Any]) -> list[str]:
    """The loss of an evaluation, and what else is known of it, in words."""
    names = {"val_perplexity": "perplexity", "val_bits_per_byte": "bits per byte"}
    known = [
        f"  {name} {readable.loss(evaluation[key])}" for key, name in names.items() if evaluation.get(key) is not None
    ]
    return [readable.loss(evaluation["val_loss"]), *known]


def how_to_go_on(run: RunData, stopped_by: str | None) -> tuple[str, str]:
    """The next thing that a user can do, and the command that does it."""
    command = run.start.get("command", "python pretrain_gpt.py")
    if stopped_by is not None:
        return "continue", f"{command}   (the same command)"
    words = [word for word in shlex.split(command) if not word.startswith("train.steps=")]
    return "train longer", shlex.join([*words, f"train.steps={2 * max(run.steps, 1)}"])


def curve(train: Sequence[Bucket], validation: Sequence[Bucket], width: int = 72, height: int = 10) -> list[str]:
    """The losses over the steps as lines of text. A character of the line is one of four levels of its row."""
    steps, losses = ([getattr(it, name) for it in chain(train, validation)] for name in ("x", "y"))
    (first, last), (low, high) = (min(steps), max(steps)), (min(losses), max(losses))
    sums, counts = (
        np.histogram([it.x for it in train], width, (first, last), weights=its)[0]
        for its in ([it.y for it in train], None)
    )
    known, cells = counts > 0, [[" "] * width for _ in range(height)]
    line = np.interp(range(width), np.flatnonzero(known), sums[known] / counts[known], math.nan, math.nan)
    levels = np.clip((high - line) / (high - low or 1) * 4 * height, 0, 4 * height - 1)
    for column, level in enumerate(levels):
        if math.isfinite(level):
            cells[int(level) // 4][column] = "⠉⠒⠤⣀"[int(level) % 4]
    for it in validation:
        row, column = (high - it.y) / (high - low or 1) * height, (it.x - first) / (last - first or 1) * width
        cells[min(int(row), height - 1)][min(int(column), width - 1)] = "●"
    labels = {0: readable.loss(high), height - 1: readable.loss(low)}
    rows = [f"{labels.get(at, ''):>8} │{''.join(row)}".rstrip() for at, row in enumerate(cells)]
    return [*rows, f"{'':8} └{'─' * width}", f"{'':10}{first:<{width - 10}.0f}{last:>10.0f}"]


def _in_spans(named: Rows) -> Line:
    """Names and values in one line."""
    return [
        span
        for name, value in named
        for span in ((f"{name} ", QUIET), (f"{value}   ", "bold" if name == "loss" else ""))
    ]

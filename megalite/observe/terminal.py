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
from typing import Any, TextIO

from megalite.errors.problems import printable
from megalite.errors.words import several
from megalite.observe import readable
from megalite.observe.curve import draw_curve
from megalite.observe.event_words import words_of
from megalite.observe.run_data import RunData
from megalite.observe.screens import WIDTH, Line, Screen, Span
from megalite.train.history import ENDS

NAMES_EVERY = 20  # lines of a log between two lines of column names
PREPARING_LOG_S = 10  # seconds between two lines of a log about the preparation of data
LABEL, QUIET = "bold cyan", "dim"
NOTED = ("skipped", "skipped_on_request", "empty", "straggler", "profile")  # kinds of events
Words = Callable[[float], str]
COLUMNS: tuple[tuple[str, str, int, Words], ...] = (  # of a step: the name in its record, the column's, width, as text
    ("loss", "loss", 8, readable.loss),
    ("lr", "lr", 8, "{:.2e}".format),
    ("grad_norm", "grad_norm", 9, readable.loss),
    ("tokens_per_s", "tokens/s", 8, readable.rate),
    ("step_time_s", "time", 8, lambda seconds: readable.step_time(seconds).replace(" ", "")),
    ("memory_gib", "GiB", 6, readable.gibibytes),
    ("data_wait_share", "wait", 5, readable.percent),
    ("mfu", "mfu", 5, readable.percent),
    ("mfu_causal", "causal", 6, readable.percent),
    ("imbalance_max", "imbalance", 9, "{:.2f}".format),
)
LEARNING = 3  # columns that say how well the model does; the others say how fast
STYLES = {"loss": "bold", "validation": "green", "bad steps": "bold red"}


class Terminal:
    """The view of a run for who started it (train/run_log.py). Ranks that do not print pass enabled=False."""

    name = "terminal"
    _run: RunData  # from `follow` on

    def __init__(self, stream: TextIO, *, interactive: bool, enabled: bool = True) -> None:
        live = interactive and enabled and os.environ.get("TERM") != "dumb"
        self._screen = Screen(stream, live=live, silent=not enabled)
        self._began, self._title, self._steps = time.monotonic(), "", 1
        self._step_times = deque[float](maxlen=50)
        self._columns: list[tuple[str, str, int, Words]] = []  # that the first step has
        self._has_experts = False  # among them
        self._printed = 0  # steps
        self._validation = ""
        self._known_slow: set[int] = set()  # ranks that were named
        # How far the preparation of data, or the scan of a token file, is; may be called often.
        self.preparing = DataWork(self._screen, "preparing data", "prepared").show
        self.checking = DataWork(self._screen, "checking tokens", "checked").show

    def follow(self, run: RunData, title: str) -> None:
        """Show the records of a run from now on. `run` holds a record before it is shown."""
        self._run, self._title, self._steps = run, title, run.steps
        self._began = time.monotonic()

    def add(self, record: Mapping[str, Any]) -> None:
        """Show a record, if the user wants to know."""
        kind, step = record.get("kind"), record["step"]
        if kind is None:
            (self._evaluation if "val_loss" in record else self._step)(record)
        elif kind in ("start", "resume"):
            self._header(record["about"], step)
        elif kind == "checkpoint_failed":
            self.note(f"warning: {words_of(record)}")
        elif kind == "sample" and step < self._steps:  # else the summary shows it
            self._screen.print([(self._at(step), "bold"), ("  the model writes", QUIET)])
            self._screen.print(*self._quoted(record["prompt"] + record["text"]))
        elif kind in NOTED and record.get("rank") not in self._known_slow:
            self.note(f"step {step}: {words_of(record)}")
        elif kind in ENDS and kind != "failed":
            self._finish(record.get("by"))
        self._known_slow |= {record["rank"]} if kind == "straggler" else set()

    def note(self, text: str) -> None:
        """Show a line: a warning, a checkpoint that was passed over."""
        self._screen.print(*[[(line, "yellow")] for line in text.splitlines()])

    def close(self) -> None:
        """Leave the terminal as it was; also after an error. May be repeated."""
        self._screen.close()

    def _header(self, rows: Sequence[Sequence[str]], first_step: int) -> None:
        """Show what is about to be trained: (label, text) pairs."""
        width = max([len(label) for label, _ in rows], default=0)
        lines: list[Line] = [[("megalite", LABEL), (f"  {self._title}", "bold")]]
        room = max(20, self._screen.width - width - 4)
        for label, text in rows:
            cut = textwrap.wrap(printable(text), room, break_long_words=False, break_on_hyphens=False)
            for name, words in zip([label] + [""] * len(cut), cut or [""], strict=False):
                lines.append([(f"  {name:<{width}}", LABEL), (f"  {words}", "")])
        self._screen.print(*lines, [])
        self._screen.status(self._bar(first_step), [("waiting for the first step", QUIET)], now=True)

    def _step(self, record: Mapping[str, Any]) -> None:
        step, moe = record["step"], record.get("moe")
        self._step_times.append(record["step_time_s"])
        values = {**record, **(moe or {})}
        if moe is not None:
            values["mfu_causal"] = None  # a line has room for one more
        if not self._columns or (moe and not self._has_experts):  # none where a first step was skipped
            self._columns = [column for column in COLUMNS if values.get(column[0]) is not None]
            self._has_experts, self._printed = moe is not None, 0
        found = [(values.get(key), words) for key, _, _, words in self._columns]
        cells = ["-" if value is None else words(value) for value, words in found]
        if self._screen.live:
            named = [(name, cell) for (_, name, _, _), cell in zip(self._columns, cells, strict=True)]
            learning = [*named[:LEARNING], ("validation", self._validation), ("bad steps", f"{record['bad_steps']:,}")]
            lines = [[it for it in line if it[1] not in ("", "0")] for line in (learning, named[LEARNING:])]
            self._screen.status(self._bar(step), *map(_in_spans, lines), now=step == self._steps)
            return
        digits = len(str(self._steps))
        names = ["step", *(name for _, name, _, _ in self._columns), "left"]
        widths = [max(9, 2 * digits + 1), *(width for _, _, width, _ in self._columns), 8]
        gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
        rows = [(names, "bold")] if self._printed % NAMES_EVERY == 0 else []
        rows.append(([f"{step:>{digits}}/{self._steps}", *cells, self._left(step).replace(" ", "")], ""))
        for row, style in rows:
            self._screen.print([(gap.join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)), style)])
        self._printed += 1

    def _evaluation(self, record: Mapping[str, Any]) -> None:
        loss = readable.loss(record["val_loss"])
        self._validation = f"{loss} (step {record['step']})"
        spans = [(self._at(record["step"]), "bold"), ("  validation loss ", QUIET), (loss, "bold green")]
        for name, value in other_measures(record).items():
            spans += [(f"  {name} ", QUIET), (value, "")]
        self._screen.print([*spans, (f"  ({readable.step_time(record['eval_time_s'])})", QUIET)])

    def _finish(self, stopped_by: str | None) -> None:
        """Show the summary."""
        self._screen.close()
        run, done = self._run, f"finished: {self._run.step:,} of {several(self._steps, 'step')}"
        head = done if stopped_by is None else f"stopped by {stopped_by} after step {run.step} of {self._steps}"
        learned = what_was_learned(run, time.monotonic() - self._began)
        self._screen.print([], [(head, "bold")], *_rows(learned), [])
        train, validation = ([(it.x, it.y) for it in run.series[name].buckets] for name in ("loss", "val_loss"))
        if len(train) > 1 and self._screen.unicode:
            picture = draw_curve(train, validation, width=max(20, min(72, self._screen.width - 14)))
            legend = "⠒ training, smoothed" + ("   ● validation" if validation else "")
            self._screen.print(*[[(line, "")] for line in (f"{'loss':>8}   {legend}", *picture, "")])
        samples = run.samples.get(run.step, {}) if stopped_by is None else {}
        if samples:
            self._screen.print([("the model writes", LABEL)])
        for prompt, text in samples.items():
            self._screen.print(*self._quoted(prompt + text), [])
        self._screen.print(*_rows([("run folder", str(run.folder)), how_to_go_on(run, stopped_by)]))

    def _at(self, step: int) -> str:
        return f"step {step:>{len(str(self._steps))}}"

    def _quoted(self, text: str) -> list[Line]:
        """Lines of a sample, cut to the screen's width, otherwise untouched."""
        width = max(20, self._screen.width - 4)
        lines = [line.expandtabs(4) for line in printable(text).splitlines()]
        cut = [line[at : at + width] for line in lines for at in range(0, max(len(line), 1), width)]
        return [[("  | ", QUIET), (line, "")] for line in cut]

    def _bar(self, step: int) -> Line:
        """The progress bar; its length follows the terminal's width."""
        done = step / self._steps if self._steps else 1.0
        name = f"step {step}/{self._steps} "
        passed = readable.duration(time.monotonic() - self._began)
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
        counts = f"{several(documents, 'document')}, {readable.count(tokens)} tokens"
        if self._finished:
            return
        if bytes_done >= bytes_total > 0:
            self._finished = True
            self._screen.status(now=True)  # no bar stays behind
            took = readable.duration(now - self._began)
            self._screen.print([(f"{self._done} {readable.size(bytes_total)}: {counts} in {took}", "")])
            return
        share = bytes_done / bytes_total if bytes_total else 0.0
        of, left = f" of {readable.size(bytes_total)}" if bytes_total else "", ""
        if (made := bytes_done - self._there) > 0.02 * (bytes_total - self._there) > 0:
            left = f"  {readable.duration((now - self._began) / made * (bytes_total - bytes_done))} left"
        text = f"{readable.size(bytes_done)}{of}, {counts}{left}"
        line = [(f"{self._doing} ", "bold"), *bar(share, 30), (f" {100 * share:3.0f}%", "")]
        self._screen.status(line, [(text, QUIET)])
        if not self._screen.live and now - self._logged >= PREPARING_LOG_S:
            self._logged = now
            self._screen.print([(f"{self._doing}: {text}", "")])


def bar(done: float, width: int) -> list[Span]:
    """A bar of `width` characters of which the share `done` is filled."""
    width = max(width, 4)
    filled = int(width * min(max(done, 0.0), 1.0))
    return [("━" * filled, "green"), ("─" * (width - filled), "bright_black")]


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
        losses = dict.fromkeys(map(readable.loss, (first["val_loss"], newest["val_loss"])))
        validation = [" -> ".join(losses)]
        if run.best is not None and run.best[0] != newest["step"]:
            validation.append(f"best {readable.loss(run.best[1])} at step {run.best[0]}")
        others = [f"{name} {value}" for name, value in other_measures(newest).items()]
        rows.append(("validation loss", ", ".join([*validation, *others])))
    if bad := last.get("bad_steps"):
        rows.append(("bad steps", f"{bad}, not applied: loss or gradient was not finite"))
    return rows


def other_measures(evaluation: Mapping[str, Any]) -> dict[str, str]:
    """The numbers of an evaluation besides the loss, in words by name."""
    words: dict[str, tuple[str, Words]] = {
        "val_perplexity": ("perplexity", readable.perplexity),
        "val_bits_per_byte": ("bits per byte", readable.loss),
    }
    return {name: say(evaluation[key]) for key, (name, say) in words.items() if evaluation.get(key) is not None}


def how_to_go_on(run: RunData, stopped_by: str | None) -> tuple[str, str]:
    """The next thing that a user can do, and the command that does it."""
    command = run.start.get("command", "python pretrain_gpt.py")
    if stopped_by is not None:
        return "continue", f"{command}   (the same command)"
    words = [word for word in shlex.split(command) if not word.startswith("train.steps=")]
    return "train longer", shlex.join([*words, f"train.steps={2 * max(run.steps, 1)}"])


def _rows(rows: Sequence[tuple[str, str]]) -> list[Line]:
    return [[(f"  {name:<15}", LABEL), (f"  {text}", "")] for name, text in rows]


def _in_spans(named: Sequence[tuple[str, str]]) -> Line:
    """Names and values in one line."""
    return [span for name, value in named for span in ((f"{name} ", QUIET), (f"{value}   ", STYLES.get(name, "")))]

"""What a user sees of a run: a header, the newest figures under a progress bar or as aligned lines, what was learned.

On a terminal the figures of the newest step stand below a progress bar and evaluations scroll past above it; anywhere
else (a SLURM log, a pipe) every shown step is one line of at most 100 columns, under column names that are repeated.
"""

import os
import shlex
import statistics
import textwrap
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO

from megalite.errors.problems import printable
from megalite.observe import readable
from megalite.observe.curve import Point, draw_curve
from megalite.observe.run_data import RunData, Series
from megalite.observe.screens import WIDTH, Line, Screen, Span
from megalite.train.recorder import EvaluationRecord, StepRecord

NAMES_EVERY = 20  # lines of a log between two lines of column names
PREPARING_LOG_S = 10  # seconds between two lines of a log about the preparation of data
LABEL, QUIET = "bold cyan", "dim"
Words = Callable[[float], str]
COLUMNS: tuple[tuple[str, str, int, Words], ...] = (  # of a step: its figure, the column's name and width, as text
    ("loss", "loss", 8, readable.loss),
    ("lr", "lr", 8, "{:.2e}".format),
    ("grad_norm", "grad_norm", 9, readable.loss),
    ("tokens_per_s", "tokens/s", 8, readable.rate),
    ("step_time_s", "time", 8, lambda seconds: readable.step_time(seconds).replace(" ", "")),
    ("memory_gib", "GiB", 6, readable.gibibytes),
    ("data_wait_share", "wait", 5, readable.percent),
    ("mfu", "mfu", 5, readable.percent),
    ("mfu_causal", "causal", 6, readable.percent),
)
LEARNING = 3  # of the columns: how well the model does; the others say how fast
STYLES = {"loss": "bold", "validation": "green", "bad steps": "bold red"}


class Terminal:
    """The view of one run. Ranks that do not print pass enabled=False."""

    def __init__(self, stream: TextIO, *, interactive: bool, enabled: bool = True) -> None:
        live = interactive and enabled and os.environ.get("TERM") != "dumb"
        self._screen = Screen(stream, live=live, silent=not enabled)
        self._pace = Pace()
        self._columns: list[tuple[str, str, int, Words]] = []  # that the first step has
        self._printed = 0  # steps
        self._validation: EvaluationRecord | None = None
        self._began = time.monotonic()
        self._digits = 1  # of the last step
        # How far the preparation of data, or the scan of a token file, is; may be called often.
        self.preparing = DataWork(self._screen, "preparing data", "prepared").show
        self.checking = DataWork(self._screen, "checking tokens", "checked").show

    def header(self, title: str, rows: Sequence[Sequence[str]], *, first_step: int, steps: int) -> None:
        """Show what is about to be trained. `rows` are (label, text) pairs."""
        width = max([len(label) for label, _ in rows], default=0)
        lines: list[Line] = [[("megalite", LABEL), (f"  {title}", "bold")]]
        room = max(20, self._screen.width - width - 4)
        for label, text in rows:
            cut = textwrap.wrap(printable(text), room, break_long_words=False, break_on_hyphens=False)
            for name, words in zip([label] + [""] * len(cut), cut or [""], strict=False):
                lines.append([(f"  {name:<{width}}", LABEL), (f"  {words}", "")])
        self._screen.print(*lines, [])
        self._began, self._digits = time.monotonic(), len(str(steps))
        self._screen.status(self._bar(first_step, steps), [("waiting for the first step", QUIET)], now=True)

    def step(self, record: StepRecord) -> None:
        """Show one optimizer step."""
        self._pace.add(record.step_time_s)
        values = vars(record)
        self._columns = self._columns or [column for column in COLUMNS if values[column[0]] is not None]
        cells = ["-" if values[figure] is None else words(values[figure]) for figure, _, _, words in self._columns]
        if self._screen.live:
            last = record.step == record.steps
            self._screen.status(self._bar(record.step, record.steps), *self._figures(record, cells), now=last)
            return
        digits = len(str(record.steps))
        names = ["step", *(name for _, name, _, _ in self._columns), "left"]
        widths = [max(9, 2 * digits + 1), *(width for _, _, width, _ in self._columns), 8]
        left = readable.duration(self._pace.left(record.steps - record.step)).replace(" ", "")
        gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
        rows = [(names, "bold")] if self._printed % NAMES_EVERY == 0 else []
        rows.append(([f"{record.step:>{digits}}/{record.steps}", *cells, left], ""))
        for row, style in rows:
            self._screen.print([(gap.join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)), style)])
        self._printed += 1

    def evaluation(self, record: EvaluationRecord) -> None:
        """Show the validation set after a step."""
        self._validation = record
        values = [("validation loss", readable.loss(record.val_loss), "bold green")]
        values.append(("perplexity", readable.perplexity(record.val_perplexity), ""))
        if record.val_bits_per_byte is not None:
            values.append(("bits per byte", readable.loss(record.val_bits_per_byte), ""))
        spans: list[Span] = [(f"step {record.step:>{self._digits}}", "bold")]
        for name, value, style in values:
            spans += [(f"  {name} ", QUIET), (value, style)]
        self._screen.print([*spans, (f"  ({readable.step_time(record.eval_time_s)})", QUIET)])

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Show what the model makes of a prompt after a step."""
        self._screen.print([(f"step {step:>{self._digits}}", "bold"), ("  the model writes", QUIET)])
        self._screen.print(*self._quoted(prompt + text))

    def note(self, text: str) -> None:
        """Show a line: a warning, a checkpoint that was passed over."""
        self._screen.print(*[[(line, "yellow")] for line in text.splitlines()])

    def finish(self, run: RunData, *, tokens: int, seconds: float, stopped_by: str | None) -> None:
        """Show what was learned. `tokens`: that the run has seen; `seconds`: of this start."""
        self._screen.close()
        head = f"finished: {run.step} of {run.steps} steps"
        if stopped_by is not None:
            head = f"stopped by {stopped_by} after step {run.step} of {run.steps}"
        self._screen.print([], [(head, "bold")], *_rows(what_was_learned(run, tokens, seconds)), [])
        self._screen.print(*[[(line, "")] for line in self._curve(run)])
        samples = run.samples.get(run.step, {}) if stopped_by is None else {}
        if samples:
            self._screen.print([("the model writes", LABEL)])
        for prompt, text in samples.items():
            self._screen.print(*self._quoted(prompt + text), [])
        self._screen.print(*_rows([("run folder", str(run.folder)), how_to_go_on(run, stopped_by)]))

    def close(self) -> None:
        """Leave the terminal as it was; also after an error. May be repeated."""
        self._screen.close()

    def _quoted(self, text: str) -> list[Line]:
        """Lines of a sample, cut to the screen's width, otherwise untouched."""
        width = max(20, self._screen.width - 4)
        lines = [line.expandtabs(4) for line in printable(text).splitlines()]
        cut = [line[at : at + width] for line in lines for at in range(0, max(len(line), 1), width)]
        return [[("  | ", QUIET), (line, "")] for line in cut]

    def _curve(self, run: RunData) -> list[str]:
        train, validation = _points(run.figures["loss"]), _points(run.figures["val_loss"])
        if len(train) < 2 or not self._screen.unicode:
            return []
        picture = draw_curve(train, validation, width=max(20, min(72, self._screen.width - 14)))
        legend = "⠒ training, smoothed" + ("   ● validation" if validation else "")
        return [f"{'loss':>8}   {legend}", *picture, ""]

    def _bar(self, step: int, steps: int) -> Line:
        """The progress bar; its length follows the terminal's width."""
        done = step / steps if steps else 1.0
        name = f"step {step}/{steps} "
        passed, left = time.monotonic() - self._began, self._pace.left(steps - step)
        clock = f" {100 * done:3.0f}%  {readable.duration(passed)} passed, {readable.duration(left)} left"
        return [(name, "bold"), *bar(done, self._screen.width - len(name) - len(clock) - 1), (clock, "")]

    def _figures(self, record: StepRecord, cells: Sequence[str]) -> list[Line]:
        """The newest figures in two lines."""
        named = [(name, cell) for (_, name, _, _), cell in zip(self._columns, cells, strict=True)]
        learning, speed = named[:LEARNING], named[LEARNING:]
        if self._validation is not None:
            newest = self._validation
            learning.append(("validation", f"{readable.loss(newest.val_loss)} (step {newest.step})"))
        if record.bad_steps:
            learning.append(("bad steps", readable.count(record.bad_steps)))
        return [
            [span for name, value in line for span in ((f"{name} ", QUIET), (f"{value}   ", STYLES.get(name, "")))]
            for line in (learning, speed)
        ]


class Pace:
    """Time per step as a running median, which one slow step (a compilation, a checkpoint) does not move."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=50)
        self._steps = 0

    def add(self, seconds: float) -> None:
        """Add a step. The first, slow for its compilation, only counts while it is alone."""
        self._steps += 1
        if self._steps == 2:
            self._recent.clear()
        self._recent.append(seconds)

    def left(self, steps: int) -> float:
        """Seconds that `steps` more steps take; nan where none was seen yet."""
        return statistics.median(self._recent) * steps if self._recent else float("nan")


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
        counts = f"{readable.several(documents, 'document')}, {readable.count(tokens)} tokens"
        if bytes_done >= bytes_total > 0:
            if not self._finished:
                self._screen.status(now=True)  # no bar stays behind
                took = readable.duration(now - self._began)
                self._screen.print([(f"{self._done} {readable.size(bytes_total)}: {counts} in {took}", "")])
            self._finished = True
            return
        text, head = f"{readable.size(bytes_done)}, {counts}", [(self._doing, "bold")]
        if bytes_total:
            share = bytes_done / bytes_total
            head += [(" ", ""), *bar(share, 30), (f" {100 * share:3.0f}%", "")]
            text = f"{readable.size(bytes_done)} of {readable.size(bytes_total)}, {counts}"
            if (made := bytes_done - self._there) > 0.02 * (bytes_total - self._there):
                text += f"  {readable.duration((now - self._began) / made * (bytes_total - bytes_done))} left"
        self._screen.status(head, [(text, QUIET)])
        if not self._screen.live and now - self._logged >= PREPARING_LOG_S:
            self._logged = now
            self._screen.print([(f"{self._doing}: {text}", "")])


def bar(done: float, width: int) -> list[Span]:
    """A bar of `width` characters of which the share `done` is filled."""
    width = max(width, 4)
    filled = int(width * min(max(done, 0.0), 1.0))
    return [("━" * filled, "green"), ("─" * (width - filled), "bright_black")]


def what_was_learned(run: RunData, tokens: int, seconds: float) -> list[tuple[str, str]]:
    """Rows of the summary."""
    first, last, newest = run.first, run.last, run.evaluation
    mean, rate = (readable.rate(last.get(name, 0.0)) for name in ("mean_tokens_per_s", "tokens_per_s"))
    rows = [
        ("time", readable.duration(seconds)),
        ("speed", f"{mean} tokens/s, in the newest steps {rate}"),
        ("tokens seen", readable.count(tokens)),
    ]
    if last:
        rows.append(("training loss", f"{readable.loss(first['loss'])} -> {readable.loss(last['loss'])}"))
    if newest:
        losses = dict.fromkeys(map(readable.loss, (first["val_loss"], newest["val_loss"])))
        validation = [" -> ".join(losses)]
        if run.best is not None and run.best[0] != newest["step"]:
            validation.append(f"best {readable.loss(run.best[1])} at step {run.best[0]}")
        for name, label, words in (
            ("val_perplexity", "perplexity", readable.perplexity),
            ("val_bits_per_byte", "bits per byte", readable.loss),
        ):
            if newest.get(name) is not None:
                validation.append(f"{label} {words(newest[name])}")
        rows.append(("validation loss", ", ".join(validation)))
    if bad := last.get("bad_steps"):
        rows.append(("bad steps", f"{bad}, not applied: loss or gradient was not finite"))
    return rows


def how_to_go_on(run: RunData, stopped_by: str | None) -> tuple[str, str]:
    """What the user can do next, and the command that does it."""
    command = run.start.get("command", "python pretrain_gpt.py")
    if stopped_by is not None:
        return "continue", f"{command}   (the same command)"
    words = [word for word in shlex.split(command) if not word.startswith("train.steps=")]
    return "train longer", shlex.join([*words, f"train.steps={2 * max(run.steps, 1)}"])


def _rows(rows: Sequence[tuple[str, str]]) -> list[Line]:
    return [[(f"  {name:<15}", LABEL), (f"  {text}", "")] for name, text in rows]


def _points(series: Series) -> list[Point]:
    """Steps and values, from the very first step to the last."""
    return list({step: bucket.y for bucket in series.buckets for step in (bucket.first, bucket.last)}.items())

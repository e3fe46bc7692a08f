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
from collections.abc import Callable
from typing import TextIO

from megalite.errors.problems import printable
from megalite.observe import readable
from megalite.observe.curve import draw_curve
from megalite.observe.screens import WIDTH, Line, LiveScreen, LogScreen, Screen, SilentScreen, Span
from megalite.observe.views import HeaderView, Summary
from megalite.train.recorder import EvaluationRecord, StepRecord

NAMES_EVERY = 20  # lines of a log between two lines of column names
PREPARING_LOG_S = 10  # seconds between two lines of a log about the preparation of data
LABEL = "bold cyan"
QUIET = "dim"
ALARM = "bold red"
LEFT = 8  # width of the time that is left


class Terminal:
    """The view of one run. Ranks that do not print pass enabled=False."""

    def __init__(self, stream: TextIO, *, interactive: bool, enabled: bool = True) -> None:
        self._screen: Screen = SilentScreen()
        if enabled:
            live = interactive and os.environ.get("TERM") != "dumb"
            self._screen = LiveScreen(stream) if live else LogScreen(stream)
        self._pace = Pace()
        self._table: Table | None = None
        self._data_work: DataWork | None = None
        self._validation: EvaluationRecord | None = None
        self._began = time.monotonic()
        self._digits = 1  # of the last step

    def preparing(self, bytes_done: int, bytes_total: int, documents: int, tokens: int) -> None:
        """How far the preparation of the data is; may be called often."""
        self._data_work = self._data_work or DataWork(self._screen, "preparing data", "prepared")
        self._data_work.show(bytes_done, bytes_total, documents, tokens)

    def checking(self, bytes_done: int, bytes_total: int, documents: int, tokens: int) -> None:
        """How far the scan of a token file is; may be called often."""
        self._data_work = self._data_work or DataWork(self._screen, "checking tokens", "checked")
        self._data_work.show(bytes_done, bytes_total, documents, tokens)

    def header(self, header: HeaderView) -> None:
        """What is about to be trained, once."""
        width = max([len(label) for label, _ in header.rows], default=0)
        lines: list[Line] = [[("megalite", LABEL), (f"  {header.title}", "bold")]]
        room = max(20, self._screen.width - width - 4)
        for label, text in header.rows:
            parts = textwrap.wrap(printable(text), room, break_long_words=False, break_on_hyphens=False)
            for name, part in zip([label] + [""] * len(parts), parts or [""], strict=False):
                lines.append([(f"  {name:<{width}}", LABEL), (f"  {part}", "")])
        self._screen.print(*lines, [])
        self._began, self._digits = time.monotonic(), len(str(header.steps))
        waiting: Line = [("waiting for the first step", QUIET)]
        self._screen.status(self._bar(header.first_step, header.steps), waiting, now=True)

    def step(self, view: StepRecord) -> None:
        """One optimizer step."""
        self._pace.add(view.step_time_s)
        if self._screen.live:
            last = view.step == view.steps
            self._screen.status(self._bar(view.step, view.steps), *self._figures(view), now=last)
            return
        if self._table is None:
            self._table = Table(view)
        self._screen.print(*self._table.lines(view, self._pace.left(view.steps - view.step)))

    def evaluation(self, view: EvaluationRecord) -> None:
        """The validation set after a step."""
        self._validation = view
        parts = [("validation loss", readable.loss(view.loss)), ("perplexity", readable.perplexity(view.perplexity))]
        if view.bits_per_byte is not None:
            parts.append(("bits per byte", readable.loss(view.bits_per_byte)))
        spans: list[Span] = [(f"step {view.step:>{self._digits}}", "bold")]
        for name, value in parts:
            spans += [(f"  {name} ", QUIET), (value, "bold green" if name == "validation loss" else "")]
        self._screen.print([*spans, (f"  ({readable.step_time(view.seconds)})", QUIET)])

    def sample(self, step: int, prompt: str, text: str) -> None:
        """What the model makes of a prompt after a step."""
        self._screen.print([(f"step {step:>{self._digits}}", "bold"), ("  the model writes", QUIET)])
        self._screen.print(*self._quoted(prompt + text))

    def note(self, text: str) -> None:
        """Something worth a line: a warning, a checkpoint that was passed over."""
        self._screen.print(*[[(line, "yellow")] for line in text.splitlines()])

    def finish(self, summary: Summary) -> None:
        """What was learned; the last that a run says."""
        self._screen.close()
        self._screen.print([], *summary_lines(summary), [])
        self._screen.print(*[[(line, "")] for line in self._curve(summary)])
        if summary.samples:
            self._screen.print([("the model writes", LABEL)])
        for prompt, text in summary.samples:
            self._screen.print(*self._quoted(prompt + text), [])
        self._screen.print(*ending_lines(summary))

    def close(self) -> None:
        """Leave the terminal as it was; also after an error. May be repeated."""
        self._screen.close()

    def _quoted(self, text: str) -> list[Line]:
        return [[("  | ", QUIET), (part, "")] for part in self._wrapped(printable(text))]

    def _wrapped(self, text: str) -> list[str]:
        """Lines of a sample, cut to the screen's width, otherwise untouched."""
        width = max(20, self._screen.width - 4)
        lines = [line.expandtabs(4) for line in text.splitlines()]
        return [line[at : at + width] for line in lines for at in range(0, max(len(line), 1), width)]

    def _curve(self, summary: Summary) -> list[str]:
        if len(summary.train_curve) < 2:
            return []
        plain = self._screen.plain
        width = max(20, min(72, self._screen.width - 14))
        picture = draw_curve(summary.train_curve, summary.validation_curve, width=width, plain=plain)
        if not picture:
            return []
        legend = "* training, smoothed   o validation" if plain else "⠒ training, smoothed   ● validation"
        return [f"{'loss':>8}   {legend if summary.validation_curve else legend.split('   ')[0]}", *picture, ""]

    def _bar(self, step: int, steps: int) -> Line:
        """The progress bar; its length follows the terminal's width."""
        done = step / steps if steps else 1.0
        left = self._pace.left(steps - step)
        name = f"step {step}/{steps} "
        passed = readable.duration(time.monotonic() - self._began)
        clock = f" {100 * done:3.0f}%  {passed} passed, {readable.duration(left)} left"
        return [(name, "bold"), *bar(done, self._screen.width - len(name) - len(clock) - 1), (clock, "")]

    def _figures(self, view: StepRecord) -> list[Line]:
        """The newest figures in two lines."""
        learning = figure("loss", readable.loss(view.loss), "bold") + figure("lr", f"{view.lr:.2e}")
        learning += figure("grad norm", readable.loss(view.grad_norm))
        if self._validation is not None:
            at = f"{readable.loss(self._validation.loss)} (step {self._validation.step})"
            learning += figure("validation", at, "green")
        if view.bad_steps:
            learning += figure("bad steps", readable.count(view.bad_steps), ALARM)
        speed = figure("", f"{readable.rate(view.tokens_per_s)} tokens/s")
        speed += figure("mean", readable.rate(view.mean_tokens_per_s))
        speed += figure("step", readable.step_time(view.step_time_s))
        speed += figure("memory", f"{readable.gibibytes(view.memory_gib)} GiB")
        speed += figure("data wait", readable.percent(view.data_wait_share))
        if view.mfu is not None and view.mfu_causal is not None:
            speed += figure("mfu", readable.percent(view.mfu)) + figure("causal", readable.percent(view.mfu_causal))
        return [learning, speed]


class Pace:
    """Time per step as a running median, which one slow step (a compilation, a checkpoint) does not move."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=50)
        self._first = True

    def add(self, seconds: float) -> None:
        """One more step. The first, slow for its compilation, only counts while it is alone."""
        if self._first and self._recent:
            self._recent.clear()
            self._first = False
        self._recent.append(seconds)

    def left(self, steps: int) -> float:
        """Seconds that `steps` more steps take; nan where none was seen yet."""
        return statistics.median(self._recent) * steps if self._recent else float("nan")


Column = tuple[str, int, Callable[[StepRecord], str]]


class Table:
    """Aligned lines for a log, cells without blanks in columns that the first step fixes: people and awk read them."""

    def __init__(self, first: StepRecord) -> None:
        digits = len(str(first.steps))
        self._columns: list[Column] = [
            ("step", max(9, 2 * digits + 1), lambda view: f"{view.step:>{digits}}/{view.steps}"),
            ("loss", 8, lambda view: readable.loss(view.loss)),
            ("lr", 8, lambda view: f"{view.lr:.2e}"),
            ("grad_norm", 9, lambda view: readable.loss(view.grad_norm)),
            ("tokens/s", 8, lambda view: readable.rate(view.tokens_per_s)),
            ("time", 8, lambda view: readable.step_time(view.step_time_s).replace(" ", "")),
            ("GiB", 6, lambda view: readable.gibibytes(view.memory_gib)),
            ("wait", 5, lambda view: readable.percent(view.data_wait_share)),
        ]
        if first.mfu is not None:
            self._columns += [
                ("mfu", 5, lambda view: "-" if view.mfu is None else readable.percent(view.mfu)),
                ("causal", 6, lambda view: "-" if view.mfu_causal is None else readable.percent(view.mfu_causal)),
            ]
        widths = [width for _, width, _ in self._columns] + [LEFT]
        self._gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
        self._printed = 0

    def lines(self, view: StepRecord, left: float) -> list[Line]:
        """The line of one step, under the column names where they are due."""
        cells = [f"{show(view):>{width}}" for _, width, show in self._columns]
        row = self._gap.join([*cells, f"{readable.duration(left).replace(' ', ''):>{LEFT}}"])
        due = self._printed % NAMES_EVERY == 0
        self._printed += 1
        return [self._names(), [(row, "")]] if due else [[(row, "")]]

    def _names(self) -> Line:
        names = [f"{name:>{width}}" for name, width, _ in self._columns]
        return [(self._gap.join([*names, f"{'left':>{LEFT}}"]), "bold")]


class DataWork:
    """The progress of making or scanning token files. The first call says what was there before."""

    def __init__(self, screen: Screen, doing: str, done: str) -> None:
        self._screen, self._doing, self._done = screen, doing, done
        self._began = self._logged = time.monotonic()
        self._there: int | None = None
        self._finished = False

    def show(self, bytes_done: int, bytes_total: int, documents: int, tokens: int) -> None:
        now = time.monotonic()
        self._there = bytes_done if self._there is None else self._there
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


def figure(name: str, value: str, style: str = "") -> list[Span]:
    """A named figure within a line."""
    return [(f"{name} " if name else "", QUIET), (value, style), ("   ", "")]


def summary_lines(summary: Summary) -> list[Line]:
    """What was learned, in words and numbers."""
    if summary.stopped_by is None:
        head = f"finished: {summary.step} of {summary.steps} steps"
    else:
        head = f"stopped by {summary.stopped_by} after step {summary.step} of {summary.steps}"
    mean, newest = readable.rate(summary.tokens_per_s), readable.rate(summary.newest_tokens_per_s)
    rows = [
        ("time", readable.duration(summary.seconds)),
        ("speed", f"{mean} tokens/s, in the newest steps {newest}"),
        ("tokens seen", readable.count(summary.tokens)),
    ]
    if summary.train_curve:
        first, last = summary.train_curve[0], summary.train_curve[-1]
        rows.append(("training loss", f"{readable.loss(first[1])} -> {readable.loss(last[1])}"))
    if summary.validation_curve:
        rows.append(("validation loss", _validation(summary)))
    if summary.bad_steps:
        rows.append(("bad steps", f"{summary.bad_steps}, not applied: loss or gradient was not finite"))
    return [[(head, "bold")], *[[(f"  {name:<15}", LABEL), (f"  {text}", "")] for name, text in rows]]


def ending_lines(summary: Summary) -> list[Line]:
    """Where everything is, and how to go on."""
    if summary.stopped_by is None:
        parts = [part for part in shlex.split(summary.command) if not part.startswith("train.steps=")]
        way = ("train longer", shlex.join([*parts, f"train.steps={2 * max(summary.steps, 1)}"]))
    else:
        way = ("continue", f"{summary.command}   (the same command)")
    rows = [("run folder", summary.run_dir), way]
    return [[(f"  {name:<15}", LABEL), (f"  {text}", "")] for name, text in rows]


def _validation(summary: Summary) -> str:
    """The last validation loss with what follows from it, and the best one if that was another."""
    curve = summary.validation_curve
    best = min(curve, key=lambda point: point[1])
    text = (
        f"{readable.loss(curve[0][1])} -> {readable.loss(curve[-1][1])}"
        if len(curve) > 1
        else readable.loss(curve[-1][1])
    )
    if best[0] != curve[-1][0]:
        text += f", best {readable.loss(best[1])} at step {best[0]}"
    if summary.perplexity is not None:
        text += f", perplexity {readable.perplexity(summary.perplexity)}"
    if summary.bits_per_byte is not None:
        text += f", bits per byte {readable.loss(summary.bits_per_byte)}"
    return text

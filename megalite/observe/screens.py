"""Where lines of text go: a live terminal, a log, or nowhere.

A line is a list of (text, style) spans. No control character of it gets to the stream. A stream that can no longer be
written to (a closed pipe, a full disk) falls silent: a run does not end because nobody looks at it.
"""

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from megalite.errors.problems import printable

Line = Sequence[tuple[str, str]]
WIDTH = 100  # columns of a log, and at most of a terminal
REDRAW_S = 0.2  # a live terminal is drawn at most this often: drawing costs a few milliseconds


def print_lines(lines: Iterable[str]) -> None:
    """Print what a command has to show, as it comes; end quietly where the reader, like `head`, has seen enough."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a stream without Unicode
    try:
        for line in lines:
            print(printable(line), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Instead of rich's own, which ends the process."""
        self.quiet = True


class Screen:
    """A live terminal, whose `status` stands below its other lines, or a log, which has none."""

    def __init__(self, stream: TextIO, *, live: bool, silent: bool) -> None:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a stream without Unicode
        self.live, self._drawn = live, 0.0
        self._console = _Console(file=stream, force_terminal=live, highlight=False, soft_wrap=True, quiet=silent)
        self.unicode = self._console.encoding.startswith("utf")
        self.width = min(self._console.width, WIDTH) if live else WIDTH
        # No refresh thread: it would take the interpreter from the training loop at any moment.
        self._status = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")

    def print(self, *lines: Line) -> None:
        """Print lines that stay."""
        if lines:
            self._attempt(lambda: self._console.print(*map(_text, lines), sep="\n"))

    def status(self, *lines: Line, now: bool = False) -> None:
        """Draw the lines at the bottom; `now`: even if the last drawing was a moment ago."""
        if self.live and (now or time.monotonic() - self._drawn >= REDRAW_S):
            self._drawn = time.monotonic()
            self._attempt(self._status.start)
            self._attempt(lambda: self._status.update(Group(*map(_text, lines)), refresh=True))

    def close(self) -> None:
        """Leave the stream as any program expects it. May be repeated."""
        self._attempt(self._status.stop)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError:
            self._console.quiet = True


def _text(line: Line) -> Text:
    return Text.assemble(*((printable(part), style) for part, style in line), overflow="ellipsis")

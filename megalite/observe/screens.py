"""Where lines of text go: a log, a live terminal, or nowhere.

A line is a list of (text, style) spans; a log drops the styles. `status` is what stands below the lines and is drawn
over: on a live terminal a few lines, in a log nothing. Whatever a line holds, no control character gets to the stream.
A screen that can no longer be written to (a closed pipe, a full disk) falls silent: a run does not end because nobody
looks at it.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TextIO

from megalite.errors.problems import printable

Span = tuple[str, str]
Line = Sequence[Span]
WIDTH = 100  # of a log's lines
REDRAW_S = 0.2  # a live terminal is drawn at most this often: drawing costs a few milliseconds


def print_lines(lines: Iterable[str]) -> None:
    """What a command has to show; it ends quietly where the reader, like `head`, has seen enough."""
    try:
        for line in lines:
            print(printable(line))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere


class Screen(Protocol):
    """What a view needs of a screen."""

    @property
    def live(self) -> bool:
        """Whether `status` is shown."""
        ...

    @property
    def plain(self) -> bool:
        """Whether only ASCII can be shown."""
        ...

    @property
    def width(self) -> int:
        """Columns to fill."""
        ...

    def print(self, *lines: Line) -> None:
        """Lines that stay."""
        ...

    def status(self, *lines: Line, now: bool = False) -> None:
        """The lines at the bottom; `now` draws them even if the last drawing was a moment ago."""
        ...

    def close(self) -> None:
        """Leave the stream as any program expects it. May be repeated."""
        ...


class SilentScreen:
    """For ranks that do not print."""

    live, plain, width = False, True, WIDTH

    def print(self, *lines: Line) -> None: ...

    def status(self, *lines: Line, now: bool = False) -> None: ...

    def close(self) -> None: ...


class LogScreen:
    """Plain lines, each flushed: SLURM's output file, a pipe."""

    live, width = False, WIDTH

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._encoding = stream.encoding or "utf-8"
        self.plain = not self._encoding.lower().replace("-", "").startswith("utf")

    def print(self, *lines: Line) -> None:
        if self._stream is None:
            return
        text = "".join(printable("".join(part for part, _ in line)).rstrip() + "\n" for line in lines)
        try:
            self._stream.write(text.encode(self._encoding, "replace").decode(self._encoding))
            self._stream.flush()
        except OSError:
            self._stream = None

    def status(self, *lines: Line, now: bool = False) -> None: ...

    def close(self) -> None: ...


class LiveScreen:
    """A terminal with a status at its foot, by `rich`, which also carries anything else that is printed above it."""

    live, plain = True, False

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, force_terminal=True, highlight=False, soft_wrap=True)
        self._live: Any = None
        self._drawn = 0.0
        self._broken = False

    @property
    def width(self) -> int:
        return min(self._console.width, WIDTH)

    def print(self, *lines: Line) -> None:
        if not self._broken:
            self._attempt(lambda: self._console.print(*[_text(line) for line in lines], sep="\n"))

    def status(self, *lines: Line, now: bool = False) -> None:
        if not self._broken:
            self._attempt(lambda: self._draw(lines, now))

    def close(self) -> None:
        if self._live is not None and not self._broken:
            self._attempt(self._live.stop)
        self._live = None

    def _draw(self, lines: Sequence[Line], now: bool) -> None:
        from rich.console import Group
        from rich.live import Live

        picture = Group(*[_text(line, cut=True) for line in lines])
        if self._live is None:
            # No refresh thread: it would take the interpreter from the training loop at any moment.
            self._live = Live(picture, console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start(refresh=True)
            return
        due = now or time.monotonic() - self._drawn >= REDRAW_S
        self._live.update(picture, refresh=due)
        if due:
            self._drawn = time.monotonic()

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError:
            self._broken = True


def _text(line: Line, *, cut: bool = False) -> Any:
    from rich.text import Text

    spans = [(printable(part), style) for part, style in line]
    return Text.assemble(*spans, no_wrap=cut, overflow="ellipsis" if cut else None)

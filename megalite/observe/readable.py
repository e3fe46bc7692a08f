"""Numbers, events and lines as people read them. Numbers have a few digits and a known width; nan and inf stay so."""

import io
import math
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from megalite.errors.problems import printable, several

count = "{:,.0f}".format


def size(count: float) -> str:
    """Bytes."""
    return f"{count / 1e6:,.1f} MB"


def loss(value: float) -> str:
    """A loss or gradient norm: four decimals where they fit, otherwise scientific. At most 8 characters."""
    small = math.isfinite(value) and (abs(value) >= 999.99995 or 0 < abs(value) < 0.001)
    return f"{value:.2e}" if small else f"{value:.4f}"


def rate(value: float) -> str:
    """Tokens, or tokens per second. At most 7 characters below a thousand billion."""
    for limit, divisor, letter in ((999.995e6, 1e9, "B"), (999_999.5, 1e6, "M")):
        if limit <= abs(value) < math.inf:
            return f"{value / divisor:,.2f}{letter}"
    return f"{value:,.0f}" if 10 <= abs(value) < math.inf else f"{value:.2f}"


def percent(share: float) -> str:
    """A share of 1. At most 5 characters."""
    return f"{share:.1%}" if not share >= 0.9995 else f"{share:.0%}"


def step_time(seconds: float) -> str:
    """The time of one step. At most 8 characters."""
    if seconds < 0.99995:
        return f"{1000 * seconds:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 1000 else f"{seconds:,.0f} s"


def duration(seconds: float) -> str:
    """A length of time: 0:42, 12:34, 1:02:03 or 3d 04h. At most 8 characters."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def words_of(event: Mapping[str, Any]) -> str:
    """What an event tells besides its kind. A user may have left things out of it."""
    if event["kind"] in ("start", "resume"):
        ranks = several(len(event.get("hosts") or []), "rank")
        return "; ".join([f"{ranks}, {event.get('device', 'device unknown')}", *(event.get("changes") or [])])
    rest = {name: value for name, value in event.items() if name not in ("time", "step", "kind", "message", "parts")}
    numbers = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in rest.items()}
    return str(event.get("message") or ", ".join(f"{name} {value}" for name, value in numbers.items()))


def print_lines(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Print lines as they come, on stdout by default, without their control characters. It ends quietly where the
    reader, like `head`, has seen enough."""
    stream = stream or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a stream without Unicode
    try:
        for line in lines:
            print(printable(line), file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is still buffered goes nowhere

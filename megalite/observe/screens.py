"""Prints lines of text: no control character of them gets to the stream."""

import io
import os
import sys
from collections.abc import Iterable
from typing import TextIO

from megalite.errors.problems import printable


def print_lines(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Print lines as they come, on stdout by default; end quietly where the reader, like `head`, has seen enough."""
    stream = stream or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a stream without Unicode
    try:
        for line in lines:
            print(printable(line), file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is still buffered goes nowhere

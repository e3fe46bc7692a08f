"""Runs a command as a user does, but in this process: what it prints, and its exit status."""

import gc
import io
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple


class Done(NamedTuple):
    """What came of a command."""

    returncode: int
    stdout: str
    stderr: str


def run(command: Callable[[list[str]], int], *arguments: str, cwd: Path | None = None) -> Done:
    """`command` is the main function, in the folder `cwd`."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with chdir(cwd or Path.cwd()), redirect_stdout(out), redirect_stderr(err):
            status = command(list(arguments))
    except SystemExit as end:  # of argparse
        status = int(end.code or 0)
    finally:
        gc.enable()  # a command that ends its process may turn it off
    return Done(status, out.getvalue(), err.getvalue())

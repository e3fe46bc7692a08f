"""Reports as files: the report that a run draws of itself while it goes on, and reports that are asked for later."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from megalite.config.files import COMPARISON, REPORT, Kind, output_problems, private_files, write_atomically
from megalite.errors.problems import Problem, UserError, collect, collect_all
from megalite.observe.report.page import render
from megalite.observe.run_data import RunData, read_run
from megalite.train.history import ENDS

SHARE = 300  # a run goes on for so many times as long as the last drawing took


class LiveReport:
    """report.html of a run that goes on, a view (train/history.py), drawn in at most one part in SHARE of its time."""

    name = REPORT.usual

    def __init__(self, run: RunData, interval_s: float) -> None:
        """`interval_s`: between two drawings at least; 0: only at the end."""
        self._run, self._interval_s = run, interval_s
        self._due = 0.0 if interval_s > 0 else float("inf")

    def add(self, record: Mapping[str, Any]) -> None:
        self._run.add(record)
        begun, ended = time.monotonic(), record.get("kind") in ENDS
        if not ended and ("kind" in record or begun < self._due):
            return
        try:
            page = render([self._run], live=not ended).encode(errors="replace")
            write_atomically(self._run.folder / REPORT.usual, page, REPORT)
        finally:
            now = time.monotonic()
            self._due = now + max(self._interval_s, SHARE * (now - begun)) if self._interval_s else self._due

    def close(self) -> None:
        """The next start draws what a run without an end has left."""


def write_report(folders: Sequence[Path], out: Path | None, kind: Kind | None = None) -> Path:
    """Draw one run, into its folder unless `out` says otherwise, or compare several (comparison.html here, or `out`).
    Returns the file, of which only `out` is as readable as the umask says. UserError with all folders that hold no run,
    or for a file that cannot be written."""
    kind = kind or (REPORT if len(folders) == 1 else COMPARISON)
    target = out or (folders[0] / kind.usual if kind is REPORT else Path(kind.usual))
    problems = output_problems("--out", target, kind)
    runs = collect(lambda: collect_all(read_run, folders), problems)
    if runs is None or problems:
        raise UserError(problems)
    try:
        with nullcontext() if out else private_files():
            write_atomically(target, render(runs, compared=kind is COMPARISON).encode(errors="replace"), kind)
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise UserError(Problem("--out", str(target), rule, "another file: --out FILE")) from error
    return target

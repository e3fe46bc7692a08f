"""Reports as files: the one that a run draws of itself while it goes on, and those that are asked for later.

A file is replaced as a whole, so a reader sees the one before or the one after. A run spends at most a few thousandths
of its time on it, and a report that cannot be drawn or written is told once and costs the run nothing.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megalite.errors.problems import Problem, UserError, collect
from megalite.observe.report.comparison import compare
from megalite.observe.report.data import RunData, read_run
from megalite.observe.report.page import render

REPORT = "report.html"
COMPARISON = "comparison.html"
SHARE = 300  # a run goes on for so many times as long as the last drawing took


class LiveReport:
    """report.html of a run that goes on, drawn by one rank."""

    def __init__(self, run: RunData, interval_s: float, tell: Callable[[str], None]) -> None:
        """`interval_s`: between two drawings at least; 0: only at the end. `tell` gets a line where something fails."""
        self._run, self._interval_s, self._tell = run, interval_s, tell
        self._next = 0.0 if interval_s > 0 else float("inf")
        self._failing = False

    def refresh(self) -> None:
        """Draw it if that is due."""
        if time.monotonic() >= self._next:
            self.draw(live=True)

    def draw(self, *, live: bool) -> None:
        """Draw it now; `live`: the run goes on."""
        begun = time.monotonic()
        try:
            write_page(self._run.folder / REPORT, render(self._run, live=live))
            self._failing = False
        except Exception as error:  # a picture of the run is not worth the run
            if not self._failing:
                reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                self._tell(f"warning: {REPORT} cannot be written for now: {reason}")
            self._failing = True
        now = time.monotonic()
        if self._interval_s > 0:
            self._next = now + max(self._interval_s, SHARE * (now - begun))


def write_page(path: Path, page: str) -> None:
    """Replace a file. Not synced: what a power cut takes of it can be drawn again."""
    draft = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with draft.open("x", encoding="utf-8", errors="replace") as file:  # never through a link that lies there
            file.write(page)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_report(folders: Sequence[Path], out: Path | None) -> Path:
    """Draw one run, into its folder unless `out` says otherwise, or compare several (comparison.html here, or `out`).

    Returns the file. Raises UserError with everything that stands against it, before anything is written.
    """
    problems: list[Problem] = []
    for path in sorted({folder for folder in folders if folders.count(folder) > 1}):
        problems.append(Problem("RUN_DIR", str(path), "is named twice", "name each run once"))
    runs = [run for folder in folders if (run := collect(lambda folder=folder: read_run(folder), problems))]  # type: ignore[misc]
    target = out or (folders[0] / REPORT if len(folders) == 1 else Path(COMPARISON))
    if target.is_dir():
        problems.append(Problem("--out", str(target), "is a folder", f"the name of a file: {target / REPORT}"))
    elif out is not None and not target.parent.is_dir():
        problems.append(Problem("--out", str(target), f"the folder {target.parent} does not exist", "make it"))
    if problems:
        raise UserError(problems)
    try:
        write_page(target, render(runs[0]) if len(runs) == 1 else compare(runs))
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise UserError(Problem("--out", str(target), rule, "another file: --out FILE")) from error
    return target

"""metrics.jsonl: one JSON object a line, every step once.

The file is an append-only log while a run lasts. A run that resumes from step k first cuts what a killed run may have
left beyond it: lines of later steps and a torn last line.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from megalite.checkpoint.commit import replace_synced
from megalite.config.problems import Problem, UserError


class MetricsFile:
    """The metrics of one run, written by one rank."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        """Open `path` for appending, keeping only complete lines of steps up to `resume_step`."""
        try:
            kept = [line for line in _complete_lines(path) if json.loads(line)["step"] <= resume_step]
            replace_synced(path, "".join(f"{line}\n" for line in kept).encode())
            self._file = path.open("a", buffering=1)
        except (OSError, UnicodeDecodeError) as error:
            remedy = "move it away (the checkpoints are not touched by that), or set another run_dir"
            raise UserError(Problem("run_dir", str(path), f"it cannot be continued: {error}", remedy)) from error

    def append(self, record: dict[str, Any]) -> None:
        """One line, handed to the operating system at once: killing the process does not lose it."""
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take was told when it was written
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file."""
    return [json.loads(line) for line in _complete_lines(path)]


def _complete_lines(path: Path) -> list[str]:
    """The lines that end in a newline and hold a JSON object with a step."""
    if not path.exists():
        return []
    complete = path.read_text().split("\n")[:-1]
    return [line for line in complete if _is_record(line)]


def _is_record(line: str) -> bool:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return False
    return isinstance(record, dict) and isinstance(record.get("step"), int)

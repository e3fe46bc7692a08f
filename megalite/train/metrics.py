"""metrics.jsonl: one JSON object a line, every step once.

The file is an append-only log while a run lasts. A run that resumes from step k first cuts what a killed run may have
left beyond it: lines of later steps and a torn last line.
"""

import json
import os
from pathlib import Path
from typing import Any


class MetricsFile:
    """The metrics of one run, written by one rank."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        """Open `path` for appending, keeping only complete lines of steps up to `resume_step`."""
        kept = [line for line in _complete_lines(path) if json.loads(line)["step"] <= resume_step]
        replacement = path.with_suffix(".tmp")
        replacement.write_text("".join(f"{line}\n" for line in kept))
        os.replace(replacement, path)
        self._file = path.open("a", buffering=1)

    def append(self, record: dict[str, Any]) -> None:
        """One line, handed to the operating system at once: killing the process does not lose it."""
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
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

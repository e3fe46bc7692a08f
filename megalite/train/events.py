"""events.jsonl: what happened to a run, one JSON object a line.

    {"time": 1790000000.123, "step": 12, "kind": "skipped", "loss": NaN, "grad_norm": NaN, "loss_scale": null}

The kinds, and what else they tell:

    start, resume                how and where the run was started: command, versions, layout, hosts
    skipped                      a step whose loss or gradient was not finite
    skipped_on_request           a step of train.skip_steps
    checkpoint                   bytes, seconds, and stall_s of them without training
    checkpoint_failed            message
    ranks                        of each rank: memory_gib at its peak, compute_s of a step without waiting for others
    straggler                    rank, host, and how many times as long as its equals it computes
    sample                       prompt, text
    profile                      folder
    stopped, finished, failed    how a start ended, by what, with which message

It is the run's history, so a resume cuts nothing: a step may stand in it more than once. Of two samples of one step and
prompt the later counts. Written by rank 0; a disk that takes nothing costs lines, never the run. No torch import.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalite.config.problems import Problem, UserError

FILE = "events.jsonl"
ENDS = ("stopped", "finished", "failed")
TYPES: dict[str, dict[str, Any]] = {  # of what readers compute with, by kind
    "checkpoint": {"bytes": int, "seconds": int | float, "stall_s": int | float},
    "ranks": {"memory_gib": list, "compute_s": list},
    "straggler": {"rank": int, "host": str, "times": int | float},
    "sample": {"prompt": str, "text": str},
}


class EventsFile:
    """The events of one run, written by one rank."""

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / FILE
        try:
            self._file = path.open("a", buffering=1, encoding="utf-8")
            torn = _is_torn(path)
        except OSError as error:
            rule = f"{FILE} cannot be continued: {error.strerror}"
            remedy = "move it away (the checkpoints are not touched by that), or set another run_dir"
            raise UserError(Problem("run_dir", str(run_dir), rule, remedy)) from error
        if torn:
            self._file.write("\n")  # what a killed run had begun stays a line of its own

    def append(self, event: dict[str, Any]) -> None:
        """One line, handed to the operating system at once. Raises OSError where that fails."""
        self._file.write(json.dumps(event) + "\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _is_torn(path: Path) -> bool:
    """Whether the last line lacks its end."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def event(kind: str, step: int, **fields: Any) -> dict[str, Any]:
    """What happens now."""
    return {"time": round(time.time(), 3), "step": step, "kind": kind, **fields}


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of an events file, none where there is no file; what is torn or damaged is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict) and _is_event(found):
                    yield found


def _is_event(found: dict[str, Any]) -> bool:
    if not isinstance(found.get("kind"), str) or type(found.get("step")) is not int:
        return False
    types = {"time": int | float, **TYPES.get(found["kind"], {})}
    return all(isinstance(found.get(name), kind) for name, kind in types.items())

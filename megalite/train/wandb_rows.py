"""What a run wrote about itself as rows for wandb: all that belongs to a step is one row, and a row is given out once.

metrics.jsonl and events.jsonl are followed while the run writes them. A row is complete when a line of a later step is
there: both files are written by one thread, step after step, and metrics.jsonl is read first, so by then events.jsonl
holds all that it will hold of the row's step. wandb takes steps in order and each once: rows are given out that way.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"


@dataclass
class Row:
    """One step: its figures by name, `group/name` where they are nested, and its samples, text by prompt."""

    step: int
    values: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)


class RowReader:
    """Follows the files of one run folder from their first line."""

    def __init__(self, folder: Path) -> None:
        self._metrics, self._events = _Tail(folder / METRICS), _Tail(folder / EVENTS)
        self._waiting: dict[int, Row] = {}
        self._newest = -1  # step of the newest line of metrics.jsonl

    def complete(self) -> list[Row]:
        """Read on; the rows to which nothing can come any more."""
        self._read()
        return self._taken(self._newest - 1)

    def rest(self) -> list[Row]:
        """Read on; all rows, for a run that has ended."""
        self._read()
        return self._taken(self._newest)

    def _read(self) -> None:
        for line in self._metrics.new_lines():
            step = line.pop("step", None)
            if isinstance(step, int):
                self._newest = max(self._newest, step)
                self._row(step).values.update(flattened(line))
        for line in self._events.new_lines():
            step = line.get("step")
            if line.get("kind") == "sample" and isinstance(step, int):
                self._row(step).samples[str(line.get("prompt"))] = str(line.get("text"))

    def _row(self, step: int) -> Row:
        return self._waiting.setdefault(step, Row(step))

    def _taken(self, last: int) -> list[Row]:
        """Rows up to step `last`, in order. Samples of later steps are of an earlier start that got further: they wait
        until this one gets there and replaces them."""
        return [self._waiting.pop(step) for step in sorted(self._waiting) if step <= last]


class _Tail:
    """The lines that a growing file has got since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Whole lines that hold a JSON object; others (torn by a full disk) are passed over."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
        except OSError:  # not there yet, or a file server that is away for a while
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested figures under `group/name`, which wandb shows as a section; what is not known (null) is left out."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flattened(value, f"{prefix}{name}/"))
        elif value is not None:
            flat[f"{prefix}{name}"] = value
    return flat

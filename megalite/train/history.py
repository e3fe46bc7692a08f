"""Reads what a run has recorded: metrics.jsonl and events.jsonl, one JSON object a line. No torch import.

metrics.jsonl holds every step once. events.jsonl is the run's history: a resume cuts nothing of it, so a step may stand
in it more than once, and of two samples of one step and prompt the later counts. An event looks like this:

    {"time": 1790000000.123, "step": 12, "kind": "skipped", "loss": NaN, "grad_norm": NaN, "loss_scale": null}

The kinds, and what else they tell:

    start, resume                how and where the run was started: command, versions, layout, hosts
    skipped                      a step whose loss or gradient was not finite
    skipped_on_request           a step of train.skip_steps
    empty                        a step of whose batch no token enters the loss
    checkpoint                   bytes, seconds, and stall_s of them without training
    checkpoint_failed            message
    ranks                        of each rank: memory_gib at its peak, compute_s of a step without waiting for others
    straggler                    rank, host, how many times as long as its equals it computes, share of a step lost
    sample                       prompt, text
    profile                      folder
    record_changed               message: a file of the record is not as it was written
    stopped, finished, failed    how a start ended, by what, with which message

A run may be killed while it appends to its files, and users edit them: a line that is no record of the right types is
named and left out. The last line without its end is what a killed run had begun, and is left out in silence.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from math import isinf
from pathlib import Path
from typing import Any, Literal

import xxhash

from megalite.config.user_files import fits, read_bytes

StepPart = Literal["data", "forward", "backward", "exchange", "communication", "optimizer", "other"]  # of a step's time
STEP_PARTS: tuple[StepPart, ...] = ("data", "forward", "backward", "exchange", "communication", "optimizer", "other")
METRICS, EVENTS, PIPELINE = "metrics.jsonl", "events.jsonl", "pipeline.jsonl"
ENDS = ("stopped", "finished", "failed")
NEEDED = {  # by kind of event: what its readers compute with
    "checkpoint": ("bytes", "seconds", "stall_s"),
    "ranks": ("memory_gib", "compute_s"),
    "straggler": ("rank", "host", "times"),
    "sample": ("prompt", "text"),
}
TYPES: dict[str, Any] = {  # of values, by name; all others of a line of metrics are numbers
    **dict.fromkeys(("time", "seconds", "stall_s", "times", "share", "loss", "grad_norm"), float),
    **dict.fromkeys(("step", "tokens", "bad_steps", "bytes", "rank", "ranks_per_node", "status"), int),
    **dict.fromkeys(("kind", "host", "prompt", "text", "message", "folder", "command", "device", "by"), str),
    **dict.fromkeys(("overrides", "hosts", "changes"), list[str]),
    **dict.fromkeys(("memory_gib", "compute_s"), float | list[float]),
    **dict.fromkeys(("mfu", "mfu_causal", "val_bits_per_byte", "loss_scale"), float | None),  # where it is known
    "versions": dict[str, str],
    "time_split": dict[str, float],
    "moe": dict[str, float | list[list[int]]],
    "cuts": dict[str, int],
    "about": list[list[str]],
    "layout": dict[str, Any],
}

Note = Callable[[str], object]  # prints a line for the user
LATEST = 1e11  # seconds since 1970: later times have no date
IN_THE_WAY = "move it away (the checkpoints are not touched by that), or set another run_dir"


def read_metrics(path: Path, note: Note = lambda text: None) -> list[dict[str, Any]]:
    """All records of a metrics file; `note` gets a line about those that are none."""
    return _read_lines(path, _is_record, note)


def read_events(path: Path, note: Note = lambda text: None) -> list[dict[str, Any]]:
    """All records of an events file; `note` gets a line about those that are none."""
    return _read_lines(path, _is_event, note)


class Seals:
    """Bytes and hash of the files of the record in a run's folder, by name: a checkpoint keeps them. A call reads what
    the files have gained since the call before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hashes = {name: xxhash.xxh3_128() for name in (METRICS, EVENTS)}
        self._bytes = dict.fromkeys(self._hashes, 0)

    def __call__(self) -> dict[str, dict[str, Any]]:
        for name, hashed in self._hashes.items():
            with suppress(OSError), open(self._folder / name, "rb") as file:  # no record is worth the run
                file.seek(self._bytes[name])
                hashed.update(gained := file.read())
                self._bytes[name] += len(gained)
        return {name: {"bytes": self._bytes[name], "hash": self._hashes[name].hexdigest()} for name in self._hashes}


def changes(folder: Path, record: Mapping[str, Any], step: int) -> list[str]:
    """Files of a run folder that are not as the checkpoint of `step` has sealed them, in words. `record`: the seals."""
    words = []
    for name in filter(record.__contains__, (METRICS, EVENTS)):
        size, path = record[name]["bytes"], folder / name
        content = read_bytes(path, IN_THE_WAY)[:size] if path.exists() else b""
        if xxhash.xxh3_128_hexdigest(content) != record[name]["hash"]:
            how = "was changed" if len(content) == size else f"has lost {size - len(content):,} bytes"
            words.append(
                f"{name} {how} after it was written, before the end of step {step:,}: its metrics may be wrong, "
                "training is not affected. If there is a copy, put it in its place"
            )
    return words


def _is_record(found: dict[str, Any]) -> bool:
    is_record = "step" in found and ("loss" in found or "val_loss" in found)
    return is_record and all(fits(value, TYPES.get(name, float)) for name, value in found.items())


def _is_event(found: dict[str, Any]) -> bool:
    needed = {"time", "step", "kind", *NEEDED.get(str(found.get("kind")), ())}
    is_event = needed <= found.keys() and all(fits(value, TYPES.get(name, Any)) for name, value in found.items())
    return is_event and 0 <= found["time"] < LATEST and all(len(row) == 2 for row in found.get("about", ()))


def _finite(text: str, kind: type = float) -> Any:
    """A number as JSON writes it. Infinity is written as such: 1e400 is none of ours."""
    if isinf(float(text)):
        raise ValueError
    return kind(text)


def _read_lines(path: Path, is_record: Callable[[dict[str, Any]], bool], note: Note) -> list[dict[str, Any]]:
    """The records of a file, none where there is no file. `note` gets a line that names what is left out."""
    records, bad = list[dict[str, Any]](), list[int]()
    lines = read_bytes(path, IN_THE_WAY).split(b"\n")[:-1] if os.path.lexists(path) else []
    for number, line in enumerate(lines, 1):
        with suppress(ValueError, RecursionError):
            found = json.loads(line.decode(), parse_float=_finite, parse_int=partial(_finite, kind=int))
            if isinstance(found, dict) and is_record(found):
                records.append(found)
                continue
        bad += [number] if line else []
    if bad:
        note(f"{path}: no valid record in line {', '.join(map(str, bad[:5]))}{', ...' * (len(bad) > 5)}; left out")
    return records

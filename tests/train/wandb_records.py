"""Reads the file in which wandb keeps a run on disk, for tests: LevelDB's log format around protobuf records."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 1 << 15, 7
PATIENCE_S = 30.0
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def history(folder: Path) -> dict[int, dict[str, Any]]:
    """What was logged, by step; see `read_json`."""
    logged: dict[int, dict[str, Any]] = {}
    for record in _records(folder):
        if record.WhichOneof("record_type") == "history":
            row = {"/".join(item.nested_key) or item.key: read_json(item.value_json) for item in record.history.item}
            step = row.pop("_step")
            assert step not in logged, f"step {step} is there twice"
            logged[step] = {name: value for name, value in row.items() if not name.startswith("_")}
    return logged


def read_json(text: str) -> Any:
    """With NaN, which equals nothing, in words."""
    return json.loads(text, parse_constant=lambda word: "not a number" if word == "NaN" else word)


def exit_code(folder: Path) -> int:
    """With which status the run ended; waits for wandb's own process to write that."""
    deadline = time.monotonic() + PATIENCE_S
    while not _exits(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    (code,) = _exits(folder)
    return code


def _exits(folder: Path) -> list[int]:
    return [int(record.exit.exit_code) for record in _records(folder) if record.WhichOneof("record_type") == "exit"]


def _records(folder: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("run-*.wandb")
    for message in _messages(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(message)
        yield record


def _messages(content: bytes) -> Iterator[bytes]:
    identifier, magic, _ = struct.unpack_from("<4sHB", content)
    assert (identifier, magic) == (b":W&B", 0xBEE1)
    position, message = HEADER, b""
    while position + HEADER <= len(content):
        left = BLOCK - position % BLOCK
        if left < HEADER:  # no header fits: the rest of the block is empty
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        if position + HEADER + length > len(content):
            return  # it is being written
        message += content[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (FULL, LAST):
            yield message
            message = b""
        else:
            assert kind in (FIRST, MIDDLE), kind

"""metrics.jsonl keeps each step once, events.jsonl everything, whatever a killed run left behind; logs are tame."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import xxhash

from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.train.history import read_events, read_metrics
from megalite.train.run_log import RecordFile, open_log


def event(kind: str, step: int) -> dict[str, Any]:
    return {"time": 1.0, "step": step, "kind": kind}


def test_resume_cuts_later_steps_and_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = [{"step": step, "loss": 1.0 / step} for step in range(1, 6)]
    path.write_text("".join(json.dumps(record) + "\n" for record in whole) + '{"step": 6, "lo')
    metrics = RecordFile(path, pytest.fail, last_step=3)
    metrics.append({"step": 4, "loss": 9.0})
    metrics.close()
    assert read_metrics(path) == [*whole[:3], {"step": 4, "loss": 9.0}]


FOREIGN = [b"mine", b"mine\n", b'{"text": "mine"}\n', b"<!DOCTYPE html>\n<html>", b"\xff\0" * 9]


@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_without_any_record_is_somebody_else_s(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl.*holds no record of a run"):
        RecordFile(path, lambda text: None, last_step=3)
    assert path.read_bytes() == content
    for torn in (b"", b'{"step": 1, "lo'):  # by a run that was killed then
        path.write_bytes(torn)
        RecordFile(path, pytest.fail, last_step=3).close()
        assert path.read_bytes() == b""


def test_a_line_is_readable_before_the_file_is_closed_and_full_precision_survives(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = RecordFile(path, pytest.fail, last_step=0)
    metrics.append({"step": 1, "loss": 0.1 + 0.2, "grad_norm": math.nan})
    (record,) = read_metrics(path)
    assert record["loss"] == 0.1 + 0.2
    assert math.isnan(record["grad_norm"])
    metrics.close()


@pytest.mark.parametrize(
    "damage",
    [
        '{"step": -3, "loss": 1.0}',
        '{"step": 2, "loss": "low"}',
        '{"step": 2, "loss": 1.0, "time_split": {"data": "long"}}',
        '{"step": 2, "loss": 1.0, "moe": {"tokens_per_expert": [[-1]]}}',
        '{"step": 2}',
        '{"step": 2, "loss": 1',
        '{"step": 2, "loss": 1e400}',
        f'{{"step": {10**400}, "loss": 1.0}}',
        '{"step": 2, "loss": 1.0, "note": "\udcff"}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:50],
)
def test_a_line_that_is_no_record_is_named_and_cut(damage: str, tmp_path: Path) -> None:
    path, notes = tmp_path / "metrics.jsonl", list[str]()
    whole = [{"step": 1, "loss": 2.0, "mfu": None}, {"step": 3, "val_loss": math.inf, "val_bits_per_byte": None}]
    lines = [json.dumps(whole[0]), damage, json.dumps(whole[1])]
    path.write_text("".join(f"{line}\n" for line in lines), errors="surrogateescape")
    RecordFile(path, notes.append, last_step=3).close()
    assert notes == [f"{path}: no valid record in line 2; left out"]
    assert read_metrics(path, pytest.fail) == whole


def test_a_file_that_a_write_has_failed_for_is_not_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = RecordFile(tmp_path / "metrics.jsonl", pytest.fail, last_step=0)
    metrics.append({"step": 1, "loss": 1.0})
    sealed = metrics.seal()
    assert sealed is not None
    content = (tmp_path / "metrics.jsonl").read_bytes()
    assert (sealed.bytes, sealed.hash) == (len(content), xxhash.xxh3_128(content).hexdigest())
    monkeypatch.setattr(metrics, "_file", Path("/dev/full").open("a", buffering=1))  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        metrics.append({"step": 2, "loss": 1.0})
    assert metrics.seal() is None


def test_what_a_killed_run_had_begun_stays_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1.0, "step": 3, "kind": "start"}\n{"time": 2.0, "st')
    events = RecordFile(path, pytest.fail)
    events.append(event("resume", 3))
    assert [(it["kind"], it["step"]) for it in read_events(path)] == [("start", 3), ("resume", 3)]
    events.close()


def test_a_file_that_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.mkdir()
    with pytest.raises(UserError, match="move it away"):
        RecordFile(path, pytest.fail)


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "straggler", "rank": None, "host": "n1", "times": 1.5},
        {"kind": "sample", "prompt": 3, "text": "x"},
        {"kind": "checkpoint", "bytes": "many", "seconds": 1.0, "stall_s": 0.0},
        {"kind": "start", "time": "yesterday"},
        {"kind": "start", "step": -3},
        {"kind": "start", "about": [["model", 3]]},
        {"kind": "profile", "parts": {"forward": "long"}},
        {"kind": "start", "time": math.nan},
        {"kind": "start", "time": 1e17},
        {"kind": "skipped", "loss": 10**400},
    ],
    ids=str,
)
def test_a_damaged_event_is_passed_over_and_named(tmp_path: Path, damage: dict[str, Any]) -> None:
    lines = [event("stopped", 3), {**event("start", 4), **damage}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path, told = tmp_path / "events.jsonl", list[str]()
    assert [it["kind"] for it in read_events(path, told.append)] == ["stopped"]
    assert told == [f"{path}: no valid record in line 2; left out"]


def test_control_characters_are_written_out_and_lines_stay_lines(tmp_path: Path) -> None:
    log = open_log(tmp_path, ParallelContext())
    log.info("saved %s\n\tand more", "a\x1b[2Jb\x07")
    log.error("failed\rwell")
    lines = (tmp_path / "logs" / "rank-00000.log").read_text().splitlines()
    assert lines[1].endswith("INFO saved a\\x1b[2Jb\\x07")
    assert lines[2] == "\tand more"
    assert lines[3].endswith("ERROR failed\\rwell")

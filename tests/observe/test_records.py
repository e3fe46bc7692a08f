"""metrics.jsonl keeps each step once, events.jsonl everything, whatever a killed run left behind; logs are tame.

Thinned numbers lose no peak, whatever the length of a run.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.observe.run_data import MOST_POINTS, Series
from megalite.train.history import RunLog, changes, open_record, read_events, read_metrics, seals
from megalite.train.saving import Progress


def event(kind: str, step: int) -> dict[str, Any]:
    return {"time": 1.0, "step": step, "kind": kind}


def test_resume_cuts_later_steps_and_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = [{"step": step, "loss": 1.0 / step} for step in range(1, 6)]
    path.write_text("".join(json.dumps(record) + "\n" for record in whole) + '{"step": 6, "lo')
    metrics = open_record(path, pytest.fail, last_step=3)
    metrics.write(json.dumps({"step": 4, "loss": 0.1 + 0.2, "grad_norm": math.inf}) + "\n")
    assert read_metrics(path) == [*whole[:3], {"step": 4, "loss": 0.1 + 0.2, "grad_norm": math.inf}]
    metrics.close()


def test_a_seal_reads_what_was_added_and_an_edit_meanwhile_is_told(tmp_path: Path) -> None:
    path, sealed = tmp_path / "metrics.jsonl", seals(tmp_path)
    for content, after in ((b"one\n", b"0ne\n"), (b"0ne\ntwo\n", b"0ne\ntwo\n")):
        path.write_bytes(content)
        record = next(sealed)
        path.write_bytes(after)
    whole = b"one\ntwo\n"
    assert record["metrics.jsonl"] == {"bytes": len(whole), "hash": xxhash.xxh3_128_hexdigest(whole)}
    (told,) = changes(tmp_path, record, 2)
    assert "metrics.jsonl was changed" in told
    path.write_bytes(whole)
    assert changes(tmp_path, record, 2) == []


@pytest.mark.parametrize("content", [b"mine\n", b'{"text": "mine"}\n'])
def test_a_file_without_any_record_is_somebody_else_s(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl.*holds no record of a run"):
        open_record(path, lambda text: None, last_step=3)
    assert path.read_bytes() == content
    for torn in (b"", b'{"step": 1, "lo'):  # by a run that was killed then
        path.write_bytes(torn)
        open_record(path, pytest.fail, last_step=3).close()
        assert path.read_bytes() == b""


DAMAGED_EVENTS: list[dict[str, Any]] = [
    {"kind": "straggler", "rank": None, "host": "n1", "times": 1.5},
    {"kind": "sample", "prompt": 3, "text": "x"},
    {"kind": "checkpoint", "bytes": "many", "seconds": 1.0, "stall_s": 0.0},
    {"kind": "start", "time": "yesterday"},
    {"kind": "start", "step": -3},
    {"kind": "start", "about": [["model", 3]]},
    {"kind": "start", "time": 1e17},
]
DAMAGED = [
    '{"step": -3, "loss": 1.0}',
    '{"step": 2, "loss": "low"}',
    '{"step": 2, "loss": 1.0, "time_split": {"data": "long"}}',
    '{"step": 2}',
    '{"step": 2, "loss": 1',
    '{"step": 2, "loss": 1e400}',
    f'{{"step": 2, "loss": 1.0, "training_s": {"9" * 310}}}',
    f'{{"step": 2, "loss": 1.0, "tokens": 1{"0" * 308}}}',  # a float holds it, and not two of them
    '{"step": 2, "loss": 1.0, "note": "\udcff"}',
    "[" * 100_000,
    *(json.dumps({**event("start", 4), **damage}) for damage in DAMAGED_EVENTS),
]


@pytest.mark.parametrize("damage", DAMAGED, ids=lambda text: text[:50])
def test_a_line_that_is_no_record_is_named_and_left_out(damage: str, tmp_path: Path) -> None:
    notes, is_event = list[str](), '"kind"' in damage
    whole = [{"step": 1, "loss": 2.0, "mfu": None}, {"step": 3, "val_loss": math.inf, "val_bits_per_byte": None}]
    whole = [event("stopped", 3)] * 2 if is_event else whole
    path = tmp_path / ("events.jsonl" if is_event else "metrics.jsonl")
    lines = [json.dumps(whole[0]), damage, json.dumps(whole[1])]
    path.write_text("".join(f"{line}\n" for line in lines), errors="surrogateescape")
    assert (read_events if is_event else read_metrics)(path, notes.append) == whole
    assert notes == [f"{path}: no valid record in line 2; left out"]
    if not is_event:  # a resume cuts it
        open_record(path, notes.append, last_step=3).close()
        assert read_metrics(path, pytest.fail) == whole


def test_a_record_that_cannot_be_read_costs_a_checkpoint_its_seal_and_no_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "events.jsonl").write_text("one")
    assert [seal["bytes"] for seal in next(seals(tmp_path)).values()] == [0, 3]


def test_of_many_bad_lines_the_first_are_named_and_that_there_are_more(tmp_path: Path) -> None:
    said: list[str] = []
    for count in (9, 1_000):
        (tmp_path / "metrics.jsonl").write_text("bad\n" * count)
        read_metrics(tmp_path / "metrics.jsonl", said.append)
    assert said[0].endswith("in line 1, 2, 3, 4, 5, 6, 7, 8, 9; left out")
    assert said[1].endswith("in line 1, 2, 3, 4, 5, 6, 7, 8, 9, ... (1,000 lines in all); left out")


def test_what_a_killed_run_had_begun_stays_a_line_of_its_own_and_a_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1.0, "step": 3, "kind": "start"}\n{"time": 2.0, "st')
    events = open_record(path)
    events.write(json.dumps(event("resume", 3)) + "\n")
    assert [(it["kind"], it["step"]) for it in read_events(path)] == [("start", 3), ("resume", 3)]
    events.close()
    with pytest.raises(UserError, match="move it away"):
        open_record(tmp_path)


def test_control_characters_are_written_out_and_lines_stay_lines(tmp_path: Path) -> None:
    log = RunLog(lambda text: None)
    job = SimpleNamespace(folder=SimpleNamespace(path=tmp_path), context=ParallelContext(rank=1), progress=Progress())
    log.open(job, lambda *_: [])  # type: ignore[arg-type]
    log.note("saved a\x1b[2Jb\x07\n\tand more")
    log.write("failed\rwell", "ERROR")
    lines = (tmp_path / "logs" / "rank-00001.log").read_text().splitlines()
    assert lines[1].endswith("INFO saved a\\x1b[2Jb\\x07")
    assert lines[2] == "\tand more"
    assert lines[3].endswith("ERROR failed\\rwell")


VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3 * MOST_POINTS)


@given(VALUES, st.integers(1, 1000))
def test_least_greatest_and_mean_survive_and_the_length_is_bounded(values: list[float], every: int) -> None:
    series = Series()
    for at, value in enumerate(values, 1):
        series.add(at * every, value)
        series.add(at * every, math.nan)  # leaves no trace
    steps, means, low, high = zip(*series.points(), strict=True)
    assert MOST_POINTS / 2 <= len(steps) <= MOST_POINTS or len(steps) == len(values)
    assert (min(low), max(high)) == (min(values), max(values))
    assert list(steps) == sorted({*steps})
    if len(steps) == len(values):
        assert list(means) == values
        assert (steps[0], steps[-1]) == (every, len(values) * every)
    assert all(least <= mean + 1e-6 and mean <= most + 1e-6 for mean, least, most in zip(means, low, high, strict=True))


def test_a_single_spike_among_a_hundred_thousand_steps_is_seen() -> None:
    series = Series()
    for step in range(1, 100_001):
        series.add(step, 50.0 if step == 77_777 else 2.0)
    (spike,) = [point for point in series.points() if point[3] == 50.0]
    assert spike[0] == pytest.approx(77_777, abs=300)
    assert len(series.points()) <= MOST_POINTS
    assert Series().points() == []

"""metrics.jsonl keeps each step once, whatever a killed run left behind."""

import json
import math
from pathlib import Path

import pytest

from megalite.observe.chronicle import MetricsFile
from megalite.train.history import read_metrics


def test_resume_cuts_later_steps_and_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = [{"step": step, "loss": 1.0 / step} for step in range(1, 6)]
    path.write_text("".join(json.dumps(record) + "\n" for record in whole) + '{"step": 6, "lo')
    metrics = MetricsFile(path, resume_step=3)
    metrics.append({"step": 4, "loss": 9.0})
    metrics.close()
    assert read_metrics(path) == [*whole[:3], {"step": 4, "loss": 9.0}]


def test_a_new_run_keeps_nothing_of_an_attempt_that_saved_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n')
    MetricsFile(path, resume_step=0).close()
    assert read_metrics(path) == []


def test_a_line_is_readable_before_the_file_is_closed_and_full_precision_survives(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, resume_step=0)
    metrics.append({"step": 1, "loss": 0.1 + 0.2, "grad_norm": math.nan})
    (record,) = read_metrics(path)
    assert record["loss"] == 0.1 + 0.2
    assert math.isnan(record["grad_norm"])
    metrics.close()


@pytest.mark.parametrize(
    "damage",
    [
        '{"step": -3, "loss": 1.0}',
        '{"step": true, "loss": 1.0}',
        '{"step": 2.5, "loss": 1.0}',
        '{"step": 2, "loss": "low"}',
        '{"step": 2, "loss": null}',
        '{"step": 2, "val_loss": "low"}',
        '{"step": 2, "loss": 1.0, "tokens": -1}',
        '{"step": 2, "loss": 1.0, "time_split": {"data": "long"}}',
        '{"step": 2, "loss": 1.0, "mfu": [1]}',
        '{"step": 2}',
        '{"loss": 1.0}',
        '{"step": 2, "loss": 1',
        "[" * 100_000,
        '{"step": 2, "lo\udcffss": 1.0}',
    ],
    ids=lambda text: text[:50],
)
def test_a_line_that_is_no_record_is_named_and_cut(damage: str, tmp_path: Path) -> None:
    path, told = tmp_path / "metrics.jsonl", list[str]()
    whole = [{"step": 1, "loss": 2.0, "mfu": None}, {"step": 3, "val_loss": math.inf, "val_bits_per_byte": None}]
    lines = [json.dumps(whole[0]), damage, json.dumps(whole[1])]
    path.write_text("".join(f"{line}\n" for line in lines), errors="surrogateescape")
    MetricsFile(path, resume_step=3, tell=told.append).close()
    assert told == [f"{path}: no valid record in line 2; left out"]
    assert read_metrics(path, pytest.fail) == whole

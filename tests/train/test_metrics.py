"""metrics.jsonl keeps each step once, whatever a killed run left behind."""

import json
import math
from pathlib import Path

from megalite.train.metrics import MetricsFile, read_metrics


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

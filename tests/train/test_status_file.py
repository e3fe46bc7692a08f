"""The status file says what became of a start, and a time limit ends one as a signal does."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.config.schema import Config
from megalite.errors.problems import UserError
from megalite.train import run as run_module
from megalite.train.history import StatusFile, read_events
from tests.train.test_run import STEPS, checkpoints, config_for, start, stop_after


def config_with_status(text: Path, folder: Path, **train: Any) -> Config:
    config = config_for(text, folder / "run", **train)
    return replace(config, launch=replace(config.launch, status_file=str(folder / "status")))


def told(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "status").read_text())
    assert found.pop("run_dir") == str(folder / "run")
    return found


def test_a_run_is_running_then_stopped_then_finished(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, train, seen = config_with_status(text, tmp_path), run_module.train, []

    def look(*args: Any) -> None:
        seen.append(told(tmp_path))
        train(*args)

    monkeypatch.setattr(run_module, "train", look)
    with monkeypatch.context() as patch:
        stop_after(6, patch)
        assert start(config) == 0
    step = checkpoints(tmp_path / "run")[-1]
    assert told(tmp_path) == {"state": "stopped", "step": step, "steps": STEPS, "by": "SIGUSR1"}
    assert start(config) == 0
    running = [{"state": "running", "step": step, "steps": STEPS} for step in (0, step)]
    assert (seen, told(tmp_path)) == (running, {"state": "finished", "step": STEPS, "steps": STEPS})
    (tmp_path / "status").unlink()
    assert start(config) == 0  # there is nothing to do
    assert told(tmp_path)["state"] == "finished"


def test_a_run_that_breaks_off_has_failed(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(run_module, "train", fail)
    with pytest.raises(ValueError, match="broken"):
        start(config_with_status(text, tmp_path))
    assert told(tmp_path)["state"] == "failed"


def test_a_batch_script_that_says_when_its_job_began_learns_what_the_start_has_gained(tmp_path: Path) -> None:
    for began in (None, int(time.time()) - 100):
        status = StatusFile(str(tmp_path / "status"), str(tmp_path / "run"), began, steps=10)
        status.write("running", 3)
        status.write("stopped", 7)
        found = told(tmp_path)
        if began is None:
            assert found == {"state": "stopped", "step": 7, "steps": 10}
        else:
            assert (found["gained"], round(found["start_up_s"], -1)) == (4, 100)
            assert 0 <= found["step_s"] < 1


def test_a_file_that_cannot_be_written_is_refused_before_training(text: Path, tmp_path: Path) -> None:
    (tmp_path / "status").mkdir()
    with pytest.raises(UserError, match=r"launch\.status_file"):
        start(config_with_status(text, tmp_path))
    assert not checkpoints(tmp_path / "run")
    elsewhere = replace(config_for(text, tmp_path / "new").launch, status_file=str(tmp_path / "gone" / "status"))
    with pytest.raises(UserError, match=r"launch\.status_file=.*gone/status': No such file or directory"):
        start(replace(config_for(text, tmp_path / "new"), launch=elsewhere))
    assert not (tmp_path / "new").exists()


def test_a_start_ends_saved_when_its_minutes_are_over(text: Path, tmp_path: Path) -> None:
    """However short they are, each start gets further."""
    config = config_with_status(text, tmp_path, max_minutes=1e-6)
    for step in (1, 2):
        assert start(config) == 0
        assert told(tmp_path) == {"state": "stopped", "step": step, "steps": STEPS, "by": "train.max_minutes"}
        assert checkpoints(tmp_path / "run")[-1] == step
    assert read_events(tmp_path / "run" / "events.jsonl")[-1]["by"] == "train.max_minutes"
    assert start(replace(config, train=replace(config.train, max_minutes=60))) == 0
    assert told(tmp_path)["state"] == "finished"

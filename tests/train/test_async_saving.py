"""`checkpoint.async`: training goes on while its state is written, and whoever ends the run waits for the write."""

import re
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megalite.train.saving as saving_module
from megalite.checkpoint import store
from megalite.checkpoint.background import BackgroundSaves
from megalite.checkpoint.store import CheckpointError
from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.train.history import RunLog
from megalite.train.saving import TrainingStoppedError
from tests.train.runs import (
    outcome,
    state_bytes,
)
from tests.train.test_bad_steps import poison
from tests.train.test_run import LAYOUTS, STEPS, at_step, checkpoints, config_for, losses, run_on, start


def behind(text: Path, run_dir: Path, **train: Any) -> Config:
    """As `config_for`: 12 steps, a checkpoint after every fourth."""
    config = config_for(text, run_dir, **train)
    return replace(config, checkpoint=replace(config.checkpoint, asynchronous=True))


def log_of(run_dir: Path, rank: int = 0) -> str:
    [path] = [path for path in (run_dir / "logs").iterdir() if re.search(rf"{rank}\D*$", path.name)]
    return path.read_text()


class Disk:
    """A file system under control: saves of the steps in `held` wait for `let_go`, those in `broken` fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: set[int] = set()
        self.broken: set[int] = set()
        self.let_go = threading.Event()
        self.begun: list[int] = []
        self.ended: list[int] = []
        save = saving_module.save

        def controlled(folder: Path, step: int, *args: Any, **kwargs: Any) -> Any:
            self.begun.append(step)
            if step in self.held:
                assert self.let_go.wait(30)
            try:
                if step in self.broken:
                    raise CheckpointError(f"the checkpoint of step {step} was not saved: no space left on device")
                return save(folder, step, *args, **kwargs)
            finally:
                self.ended.append(step)

        monkeypatch.setattr(saving_module, "save", controlled)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def wait_for_the_thread() -> None:
    while any(thread.name == "checkpoint" for thread in threading.enumerate()):
        time.sleep(0.01)


def test_a_run_that_saves_behind_equals_one_that_waits(text: Path, tmp_path: Path) -> None:
    assert start(config_for(text, tmp_path / "waits")) == 0
    assert start(behind(text, tmp_path / "behind")) == 0
    assert losses(tmp_path / "behind") == losses(tmp_path / "waits")
    for step in (8, 12):
        assert state_bytes(tmp_path / "behind", step) == state_bytes(tmp_path / "waits", step)
    assert log_of(tmp_path / "behind").count("stall_s") == 3


def test_what_is_saved_is_the_state_at_its_step_whenever_it_is_written(
    text: Path, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors, progress and all: step 4 is written while step 7 is done, and a run that goes on from it is the same."""
    copied = BackgroundSaves.copies_of

    def late(self: BackgroundSaves, pieces: Any) -> Any:
        copies, _ = copied(self, pieces)
        return copies, lambda: disk.let_go.wait(30)

    monkeypatch.setattr(BackgroundSaves, "copies_of", late)
    at_step(7, disk.let_go.set, monkeypatch)
    config = behind(text, tmp_path / "run")
    config.checkpoint.keep = 3
    assert start(config) == 0
    whole, newest = losses(tmp_path / "run"), state_bytes(tmp_path / "run", STEPS)
    for step in (8, 12):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    assert start(config) == 0
    assert disk.begun == [4, 8, 12, 8, 12]
    assert losses(tmp_path / "run") == whole
    assert state_bytes(tmp_path / "run", STEPS) == newest


def test_training_goes_on_and_the_next_save_waits(
    text: Path, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.held = {4}
    reached: list[Any] = []

    def note() -> None:  # the save of step 8 is due now
        reached.append((list(disk.begun), list(disk.ended)))
        threading.Timer(0.5, disk.let_go.set).start()

    at_step(8, note, monkeypatch)
    assert start(behind(text, tmp_path / "run")) == 0
    assert reached == [([4], [])], "steps 5 to 8 were done while step 4 was being written"
    assert disk.begun == disk.ended == [4, 8, 12]
    stalls = [float(stall) for stall in re.findall(r"stall_s ([\d.]+)", log_of(tmp_path / "run"))]
    assert stalls[0] < 0.4 < stalls[1], "the wait for the save before is part of the stall"


AT = [(4, 6), (STEPS, STEPS)]


def test_a_failure_is_told_once_and_soon_and_training_goes_on(
    text: Path, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.broken = {4, STEPS}
    disk.held = {4}
    seen: list[str] = []
    event = RunLog.event

    def heard(self: RunLog, kind: str, step: int, **fields: Any) -> None:
        seen.extend([f"{fields['message']} {step}"] if kind == "checkpoint_failed" else [])
        event(self, kind, step, **fields)

    monkeypatch.setattr(RunLog, "event", heard)

    def let_it_fail() -> None:
        disk.let_go.set()
        wait_for_the_thread()

    at_step(6, let_it_fail, monkeypatch)
    assert start(behind(text, tmp_path / "run")) == 1, "the last state is not saved"
    assert seen == [f"the checkpoint of step {at} was not saved: no space left on device {told}" for at, told in AT]
    assert disk.begun == [4, 8, STEPS]
    assert checkpoints(tmp_path / "run") == [8]


def test_giving_up_names_the_checkpoint_that_was_under_way(
    text: Path, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.held = {4}
    poison(set(range(4 * 5, 1000)), monkeypatch)  # from step 6 on
    at_step(8, lambda: threading.Timer(0.3, disk.let_go.set).start(), monkeypatch)
    assert start(behind(text, tmp_path / "run", max_bad_steps=3)) == 1
    assert "The checkpoint of step 4 is intact" in capsys.readouterr().err
    assert checkpoints(tmp_path / "run") == [4]


@pytest.mark.parametrize("error", [TrainingStoppedError("ranks 0 and 1 differ"), ValueError("a bug")])
def test_whatever_ends_the_run_the_save_under_way_comes_to_its_end(
    text: Path, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    disk.held = {4}

    def end() -> None:
        threading.Timer(0.3, disk.let_go.set).start()
        raise error

    at_step(6, end, monkeypatch)
    if isinstance(error, ValueError):
        with pytest.raises(ValueError, match="a bug"):
            start(behind(text, tmp_path / "run"))
    else:
        assert start(behind(text, tmp_path / "run")) == 1
    assert checkpoints(tmp_path / "run") == [4]
    assert "step 4: checkpoint" in log_of(tmp_path / "run")
    assert (tmp_path / "run" / "lock").read_text() == ""


def test_a_bug_in_the_thread_ends_the_run_and_is_told_as_one(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: Any, **__: Any) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(saving_module, "save", bug)
    with pytest.raises(KeyError, match="bug"):
        start(behind(text, tmp_path / "run"))
    assert "not saved" not in log_of(tmp_path / "run")


def _slow_on_rank_1(context: ParallelContext, config: Config) -> int | str:
    """Rank 1 takes its time to write, differently at every step."""
    write = store.write_file

    def slowly(path: Any, pieces: Any) -> Any:
        time.sleep(0.2 if context.rank == 1 else 0.0)
        return write(path, pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "write_file", slowly)
        return outcome(context, config)


@pytest.mark.parametrize("layout", LAYOUTS[::2])
def test_ranks_save_behind_a_training_that_goes_on(text: Path, tmp_path: Path, layout: ParallelLayout) -> None:
    """With evaluations and checks of the replicas on the training's groups meanwhile."""
    waits = config_for(text, tmp_path / "waits", check_replicas_every=2, eval_interval=2)
    config = replace(waits, run_dir=str(tmp_path / "behind"))
    config = replace(config, checkpoint=replace(config.checkpoint, asynchronous=True))
    assert run_on(layout, waits, outcome, interval=3) == [0] * layout.world_size
    assert run_on(layout, config, _slow_on_rank_1, interval=3) == [0] * layout.world_size
    assert losses(tmp_path / "behind") == losses(tmp_path / "waits")
    assert state_bytes(tmp_path / "behind", STEPS) == state_bytes(tmp_path / "waits", STEPS)
    for rank in range(layout.world_size):
        assert log_of(tmp_path / "behind", rank).count(": checkpoint") == 4

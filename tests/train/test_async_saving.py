"""`checkpoint.async`: training goes on while its state is written, and whoever ends the run waits for the write."""

import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megalite.train.loop as loop_module
import megalite.train.saving as saving_module
from megalite.checkpoint import store
from megalite.checkpoint.store import BackgroundSaves, CheckpointError
from megalite.config.compose import load_config
from megalite.config.schema import Config
from megalite.errors.problems import Problem, UserError
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.train.history import RunLog
from megalite.train.saving import TrainingStoppedError
from tests.train.runs import finish, kill, launch, metrics, outcome, overrides, state_bytes, wait_for_step, write_text
from tests.train.test_bad_steps import poison
from tests.train.test_run import STEPS, at_step, checkpoints, config_for, losses, run_on, start, stop_after


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


def test_a_failure_is_told_once_and_soon_and_training_goes_on(
    text: Path, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.broken = disk.held = {4}
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
    assert start(behind(text, tmp_path / "run")) == 0
    assert seen == ["the checkpoint of step 4 was not saved: no space left on device 6"]
    assert checkpoints(tmp_path / "run") == [8, 12]


def test_a_last_save_that_fails_is_told_once(text: Path, tmp_path: Path, disk: Disk) -> None:
    disk.broken = {STEPS}
    assert start(behind(text, tmp_path / "run")) == 1
    assert disk.begun == [4, 8, 12]
    assert log_of(tmp_path / "run").count("no space left on device") == 1
    assert checkpoints(tmp_path / "run") == [4, 8]


def test_a_stop_waits_for_the_save_under_way_and_saves_its_own_step(
    text: Path, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.held = {4}
    stop_after(6, monkeypatch)
    threading.Timer(1.0, disk.let_go.set).start()
    assert start(behind(text, tmp_path / "run")) == 0
    assert checkpoints(tmp_path / "run") == [4, max(losses(tmp_path / "run"))]
    assert disk.begun == disk.ended


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


def test_an_end_does_not_wait_for_ever_for_a_disk_that_hangs(
    text: Path, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.held = {4}
    at_step(6, lambda: int("a bug"), monkeypatch)
    config = behind(text, tmp_path / "run")
    with pytest.raises(ValueError, match="a bug"):
        start(replace(config, parallel=replace(config.parallel, timeout_s=0.3)))
    disk.let_go.set()
    wait_for_the_thread()
    assert checkpoints(tmp_path / "run") == [], "the run folder may be another job's by now"


def test_a_bug_in_the_thread_ends_the_run_and_is_told_as_one(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: Any, **__: Any) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(saving_module, "save", bug)
    with pytest.raises(KeyError, match="bug"):
        start(behind(text, tmp_path / "run"))
    assert "not saved" not in log_of(tmp_path / "run")


# --- several ranks ---------------------------------------------------------------------------------------------------


def _slow_on_rank_1(context: ParallelContext, config: Config) -> int | str:
    """Rank 1 takes its time to write, differently at every step."""
    write = store.write_file

    def slowly(path: Any, pieces: Any) -> Any:
        time.sleep(0.2 if context.rank == 1 else 0.0)
        return write(path, pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "write_file", slowly)
        return outcome(context, config)


LAYOUTS = [ParallelLayout(dp=2), pytest.param(ParallelLayout(tp=2, dp=2), marks=pytest.mark.long)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["dp 2", "tp 2, dp 2"])
def test_ranks_save_behind_a_training_that_goes_on(text: Path, tmp_path: Path, layout: ParallelLayout) -> None:
    """With evaluations and checks of the replicas on the training's groups meanwhile."""
    waits = config_for(text, tmp_path / "waits", check_replicas_every=2, eval_interval=2)
    config = replace(waits, run_dir=str(tmp_path / "behind"))
    config = replace(config, checkpoint=replace(config.checkpoint, asynchronous=True, interval=3))
    assert run_on(layout, waits, outcome, 4) == [0] * layout.world_size
    assert run_on(layout, config, _slow_on_rank_1, 3) == [0] * layout.world_size
    assert losses(tmp_path / "behind") == losses(tmp_path / "waits")
    assert state_bytes(tmp_path / "behind", STEPS) == state_bytes(tmp_path / "waits", STEPS)
    for rank in range(layout.world_size):
        assert log_of(tmp_path / "behind", rank).count(": checkpoint") == 4


def _full_on_rank_1(context: ParallelContext, config: Config) -> int | str:
    """No room for step 4 on rank 1."""
    write = store.write_file
    asked: list[None] = []

    def full(path: Any, pieces: Any) -> Any:
        asked.append(None)
        if context.rank == 1 and len(asked) == 1:
            raise OSError(28, "No space left on device")
        return write(path, pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "write_file", full)
        return outcome(context, config)


def test_a_failure_of_one_rank_is_told_by_all_once(text: Path, tmp_path: Path) -> None:
    assert run_on(ParallelLayout(dp=2), behind(text, tmp_path / "run"), _full_on_rank_1, 4) == [0, 0]
    for rank in range(2):
        log = log_of(tmp_path / "run", rank)
        assert (
            log.count("the checkpoint of step 4 was not saved: ") == log.count("No space left on device on rank 1") == 1
        )
        assert log.count("not saved") == 1
    assert checkpoints(tmp_path / "run") == [8, 12]


def _refusing_an_evaluation(context: ParallelContext, config: Config) -> int | str:
    """Rank 1 cannot read its batch of the evaluation at step 8, while step 7 is being written."""
    asked: list[None] = []
    problem = Problem("data.path", "text.txt", "cannot be read on rank 1", "mend it")

    def some(*args: Any, **kwargs: Any) -> Iterator[Any]:
        asked.append(None)
        if context.rank == 1 and len(asked) == 2:
            raise UserError(problem)
        yield from batches(*args, **kwargs)

    batches = loop_module.validation_batches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module, "validation_batches", some)
        return _slow_on_rank_1(context, config)


def test_a_refusal_ends_all_ranks_with_the_save_under_way_and_the_last_state(text: Path, tmp_path: Path) -> None:
    config = behind(text, tmp_path / "run")
    config = replace(config, checkpoint=replace(config.checkpoint, interval=7, keep=3))
    outcomes = run_on(ParallelLayout(dp=2), config, _refusing_an_evaluation, 7)
    assert all("cannot be read on rank 1" in str(outcome) for outcome in outcomes)
    assert checkpoints(tmp_path / "run") == [7, 8]


# --- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.long  # of the saves alone: tests/checkpoint/test_kill.py
@pytest.mark.parametrize(("ranks", "kills"), [(1, 2), (2, 8)])
def test_killed_at_any_moment_it_ends_where_the_uninterrupted_run_ends(tmp_path: Path, ranks: int, kills: int) -> None:
    """A save after every step, so that one is under way whenever a rank, or all, are killed."""
    write_text(tmp_path / "text.txt")
    chance = random.Random(kills)
    steps = 6 + 9 * kills
    whole = overrides(tmp_path, "whole", f"train.steps={steps}")
    assert (start(load_config(whole, 1)) if ranks == 1 else finish(launch(whole, ranks))[0]) == 0
    behind = ("checkpoint.async=true", "checkpoint.interval=1", f"train.steps={steps}")
    run, arguments = tmp_path / "killed", overrides(tmp_path, "killed", *behind)
    reached = newest = 0
    for _ in range(kills):
        process = launch(arguments, ranks)
        wait_for_step(process, run, reached + 1 + chance.randrange(3))
        time.sleep(chance.uniform(0.0, 0.05))
        if ranks == 1 or chance.random() < 0.5:
            kill(process)
        else:
            os.kill(chance.choice(children_of(process)), signal.SIGKILL)
            assert finish(process)[0] != 0
        reached = metrics(run)[-1]["step"]
        assert max(checkpoints(run), default=0) >= newest
        newest = max(checkpoints(run), default=0)
    status, output = (start(load_config(arguments, 1)), "") if ranks == 1 else finish(launch(arguments, ranks))
    assert status == 0, output
    assert not list((run / "checkpoints").glob("*.bad-*"))
    assert metrics(run) == metrics(tmp_path / "whole")
    assert state_bytes(run, steps) == state_bytes(tmp_path / "whole", steps)


def children_of(process: "subprocess.Popen[str]") -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]

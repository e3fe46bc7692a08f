"""A run folder has one owner, continues only what can be continued, and a refused start leaves no trace."""

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.checkpoint.run_folder import RunFolder, compare
from megalite.checkpoint.store import save
from megalite.config.schema import Config, TrainConfig
from megalite.config.settings import as_plain, leaves
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext, rank0_broadcast
from tests.checkpoint.samples import SINGLE, cut, files_below, values, whole
from tests.ranks import run_ranks


def settings(**changes: Any) -> dict[str, Any]:
    """A configuration as plain dictionaries; changes as model__hidden_size=8."""
    config = as_plain(Config(train=TrainConfig(steps=200)))
    for name, value in changes.items():
        *sections, field = name.split("__")
        target = config
        for section in sections:
            target = target[section]
        assert field in target, name
        target[field] = value
    return config


def start(path: Path, resume: str = "auto", fingerprint: str = "data-1", **changes: Any) -> RunFolder:
    config = settings(**changes)
    folder = RunFolder(path, SINGLE, resume, lambda step: config, fingerprint)
    try:
        folder.begin(config)
    except UserError:
        folder.withdraw()
        raise
    return folder


def start_and_save(path: Path, step: int = 1, **changes: Any) -> str:
    """One job from start to end; the run's id."""
    folder = start(path, **changes)
    state = {"config": settings(**changes)}
    save(folder.checkpoints, step, whole(values(step)), state, SINGLE, keep=2, labels=folder.labels, lost=folder.lost)
    folder.close()
    return folder.run_id


def refusal(path: Path, *arguments: Any, **changes: Any) -> str:
    with pytest.raises(UserError) as refused:
        start(path, *arguments, **changes)
    return str(refused.value)


def test_a_new_run_writes_its_settings_and_keeps_its_id(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    first = start_and_save(path, optimizer__lr=1e-5)
    assert yaml.safe_load((path / "config.yaml").read_text()) == settings(optimizer__lr=1e-5)
    again = start(path, optimizer__lr=1e-5)
    assert again.run_id == first
    assert again.changes == []
    assert again.labels == {"run_id": first, "data_fingerprint": "data-1"}
    again.close()
    assert sorted(os.listdir(path)) == ["checkpoints", "config.yaml", "lock", "run.json"]
    assert start_and_save(tmp_path / "other") != first


def test_what_may_change_is_said(tmp_path: Path) -> None:
    start_and_save(tmp_path)
    folder = start(
        tmp_path,
        optimizer__lr=0.5,
        train__steps=9,
        model__dropout=0.1,
        parallel__timeout_s=5.0,
        run_dir="x",
        resume="x",
    )
    assert folder.changes == [
        "model.dropout is now 0.1; the run was at 0",
        "optimizer.lr is now 0.5; the run was at 0.001",
        "parallel.timeout_s is now 5; the run was at 600",
        "train.steps is now 9; the run was at 200",
    ]
    folder.close()


def test_every_architecture_setting_of_the_model_is_fixed() -> None:
    """A setting that is added to the schema is fixed unless someone decides that it is free."""
    saved = settings()
    saved["model"]["moe"]["num_experts"] = saved["model"]["rope_scaling_factor"] = 8  # else the others say nothing
    free = set()
    for field, value in leaves(saved["model"]).items():
        other = deepcopy(saved)
        *groups, last = field.split(".")
        reduce(dict.__getitem__, groups, other["model"])[last] = f"not {value}"
        problems, changes = compare(saved, other)
        assert len(problems) + len(changes) == 1
        free.update([field] if changes else [])
    balancing = {"aux_loss", "aux_loss_coeff", "z_loss_coeff", "expert_bias_rate", "capacity_factor", "dispatcher"}
    assert free == {
        *("name", "dropout", "attention_dropout", "embedding_dropout", "init_std", "loss_chunk_tokens"),
        *("mup_base_width", "mup_base_layers"),
        *(f"moe.{name}" for name in balancing),
    }


@pytest.mark.parametrize(("name", "other"), [("name", "muon"), ("moment_dtype", "bf16"), ("muon__router", False)])
def test_what_decides_the_optimizers_state_is_fixed_unless_it_may_begin_anew(name: str, other: object) -> None:
    setting = f"optimizer.{name.replace('__', '.')}"
    [problem], changes = compare(settings(), settings(**{f"optimizer__{name}": other}))
    assert (problem.setting, changes) == (setting, [])
    assert "optimizer.may_change=true" in problem.hint
    problems, changes = compare(settings(), settings(**{f"optimizer__{name}": other}, optimizer__may_change=True))
    assert not problems
    assert any(change.startswith(f"{setting} is now") for change in changes)


LONGER = {"train__seq_length": 512, "model__rope_scaling": "yarn", "model__rope_scaling_factor": 2.0}


def test_sequences_may_grow_and_rotary_positions_with_them() -> None:
    problems, changes = compare(settings(), settings(**LONGER, model__rope_theta=5e5))
    assert not problems
    names = ("model.rope_scaling", "model.rope_scaling_factor", "model.rope_theta", "train.seq_length")
    assert [change.partition(" ")[0] for change in changes] == [*names]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"train__seq_length": 128}, ["train.seq_length"]),
        ({"model__rope_theta": 5e5}, ["model.rope_theta"]),
        ({**LONGER, "model__max_positions": 512}, ["model.max_positions"]),
        ({**LONGER, "seed": 1}, ["seed"]),
    ],
)
def test_what_growing_sequences_do_not_allow(changes: dict[str, Any], refused: list[str]) -> None:
    problems, _ = compare(settings(), settings(**changes))
    assert [problem.setting for problem in problems] == refused


def test_a_run_that_never_saved_may_start_as_another(tmp_path: Path) -> None:
    start(tmp_path).close()
    folder = start(tmp_path, fingerprint="data-2", model__num_layers=9)
    assert folder.changes == []
    assert folder.labels["data_fingerprint"] == "data-2"
    folder.close()


@pytest.mark.parametrize("content", [yaml.safe_dump({"seed": 7}), "a: [", "!!python/object/apply:os.mkdir [trace]"])
def test_what_a_run_was_started_with_is_told_by_its_checkpoint_alone(tmp_path: Path, content: str) -> None:
    """config.yaml is for people, who may change it: nothing vouches for it."""
    start_and_save(tmp_path)
    (tmp_path / "config.yaml").write_text(content)
    assert "set seed=1234, or another run_dir" in refusal(tmp_path, seed=7)
    start(tmp_path).close()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == settings()


def test_a_file_or_an_impossible_place_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    before = files_below(tmp_path)
    assert "Not a directory" in refusal(tmp_path / "file")
    assert "Not a directory" in refusal(tmp_path / "file" / "run")
    assert "cannot be written" in refusal(Path("/proc/megalite/run"))
    assert "File name too long" in refusal(tmp_path / "new" / ("x" * 300))
    assert "File name too long" in refusal(tmp_path / ("x" * 300))
    assert files_below(tmp_path) == before


HOLD = """
import sys, time
from pathlib import Path
from megalite.checkpoint.run_folder import take_lock
lock = take_lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def other_job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process on this host that holds the lock of tmp_path / "run"."""
    start_and_save(tmp_path / "run")
    job = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run" / "lock")], stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "held\n"
    yield job
    job.kill()
    job.wait()
    job.stdout.close()


def test_a_second_live_job_is_refused_with_host_and_pid(tmp_path: Path, other_job: subprocess.Popen[str]) -> None:
    before = files_below(tmp_path)
    text = refusal(tmp_path / "run")
    assert f"it is in use by another job: host {socket.gethostname()}, pid {other_job.pid}, started" in text
    assert files_below(tmp_path) == before


def test_the_lock_of_a_killed_job_is_taken_over_at_once(tmp_path: Path, other_job: subprocess.Popen[str]) -> None:
    other_job.kill()
    other_job.wait()
    begun = time.monotonic()
    folder = start(tmp_path / "run")
    assert time.monotonic() - begun < 2
    assert folder.lost() is None
    assert str(os.getpid()) in (tmp_path / "run" / "lock").read_text()
    folder.close()


def test_without_locks_of_the_kernel_the_job_that_started_last_has_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path)

    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    second = start(tmp_path)
    assert "was taken over by another job" in (first.lost() or "")
    assert second.lost() is None
    first.close()
    assert "elsewhere" in (tmp_path / "lock").read_text(), "a lock that was taken over is not ours to clear"


def open_with_blind_ranks(context: ParallelContext, path: Path, fingerprint: str) -> Any:
    """Ranks other than 0 see nothing of the file system while the folder is opened."""
    with pytest.MonkeyPatch.context() as patch:
        if context.rank > 0:

            def blind(*_: object, **__: object) -> None:
                raise AssertionError("a rank other than 0 looked at the file system to decide")

            for name in ("stat", "scandir", "mkdir", "listdir", "rename", "replace"):  # open: each finds the lock
                patch.setattr(os, name, blind)
        try:
            folder = RunFolder(path, context, "auto", lambda step: settings(), fingerprint)
            rank0_broadcast(context, lambda: folder.begin(settings()))
        except UserError as error:
            return str(error)
    pieces, state = cut("replicas", values(1), context.rank, context.world_size), {"config": settings()}
    save(folder.checkpoints, 1, pieces, state, context, keep=1, labels=folder.labels, lost=folder.lost)
    folder.close()
    return folder.labels, folder.checkpoints, folder.lock is not None


def test_rank_0_decides_and_all_agree(tmp_path: Path) -> None:
    first, second = run_ranks(open_with_blind_ranks, 2, tmp_path / "run", "a")
    assert first[:2] == second[:2]
    assert (first[2], second[2]) == (True, False)
    first, second = run_ranks(open_with_blind_ranks, 2, tmp_path / "run", "b")
    assert first == second
    assert "fingerprint a" in first

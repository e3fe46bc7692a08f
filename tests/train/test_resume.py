"""Nothing is lost: a run that was killed or stopped ends exactly where the uninterrupted one ends, bit for bit."""

import json
from pathlib import Path

import pytest

import pretrain_gpt
from megalite.checkpoint.manifest import MANIFEST
from megalite.config.compose import load_config
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from tests.ranks import run_ranks
from tests.train import runs
from tests.train.runs import finish, kill, launch, metrics, state_bytes, train_on_rank, wait_for_step
from tests.train.test_launch import launch_by_variables
from tests.train.test_run import stop_after

STEPS = 40


def overrides(folder: Path, run: str, *extra: str) -> list[str]:
    """With an average of the weights to carry on, weight decay that changes, and rates that follow the width."""
    settings = ("ema_half_life_steps=5", "weight_decay_schedule=to_zero")
    return runs.overrides(folder, run, *(f"optimizer.{each}" for each in settings), "model.mup_base_width=32", *extra)


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Path:
    assert run_words(ParallelContext(), overrides(folder, "whole")) == 0
    assert [record["step"] for record in metrics(folder / "whole") if "loss" in record] == list(range(1, STEPS + 1))
    return folder / "whole"


def run_words(context: ParallelContext, words: list[str]) -> int:
    """The exit status of one rank of the command with these words."""
    config = load_config(words, context.world_size)
    return train_on_rank(context, config)


def assert_same_run(run: Path, reference: Path, steps: int = STEPS) -> None:
    assert metrics(run) == metrics(reference)
    assert state_bytes(run, steps) == state_bytes(reference, steps)


def test_killed_twice_and_stopped_once_it_ends_where_the_uninterrupted_run_ends(
    folder: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = overrides(folder, "interrupted")
    run = folder / "interrupted"
    for step in (7, 18):
        process = launch(arguments)
        wait_for_step(process, run, step)
        kill(process)
    with monkeypatch.context() as patch:
        stop_after(29, patch)
        assert run_words(ParallelContext(), arguments) == 0
    stopped_at = metrics(run)[-1]["step"]
    assert 29 <= stopped_at < STEPS
    assert (run / "checkpoints" / f"step-{stopped_at:08d}").is_dir(), "the stop saved its own step"
    capsys.readouterr()
    assert run_words(ParallelContext(), arguments) == 0
    assert f"step {stopped_at}" in capsys.readouterr().out
    assert_same_run(run, uninterrupted)


def test_its_folder_alone_continues_a_run_elsewhere(
    folder: Path,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = folder / "alone"
    with monkeypatch.context() as patch:
        stop_after(7, patch)
        assert run_words(ParallelContext(), overrides(folder, "alone")) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert pretrain_gpt.main([f"run_dir={run}"]) == 0
    assert "model.dropout=0.1" in capsys.readouterr().out
    assert_same_run(run, uninterrupted)
    assert pretrain_gpt.main([f"run_dir={run}", "model.hidden_size=32"]) == 2
    assert "started with model.hidden_size=64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("axis", "optimizer"),
    [
        ("pp", "adamw"),
        ("tp", "muon"),
        *(pytest.param("dp", each, marks=pytest.mark.long) for each in ("adamw", "muon")),
    ],
)
def test_two_ranks_continue_after_one_of_them_is_killed(folder: Path, axis: str, optimizer: str) -> None:
    """Stages of a pipeline, parts of matrices, and replicas."""
    whole, broken = folder / f"whole-{axis}-{optimizer}", folder / f"broken-{axis}-{optimizer}"
    words = ["train.steps=16", "train.eval_interval=8", f"optimizer={optimizer}"]
    words += [] if axis == "dp" else [f"parallel.{axis}=2"]
    layout = ParallelLayout(**{axis: 2})
    assert run_ranks(run_words, 2, overrides(folder, whole.name, *words), layout=layout) == [0, 0]
    arguments = overrides(folder, broken.name, *words)
    ranks = launch_by_variables(arguments, 2)
    wait_for_step(ranks[0], broken, 8)
    kill(ranks[1])
    status, output = finish(ranks[0])
    assert status not in (0, 2)
    assert "no word from rank 1: killed, stopped or hanging" in output
    assert metrics(broken)[-1]["step"] < 16
    assert run_ranks(run_words, 2, arguments, layout=layout) == [0, 0]
    assert_same_run(broken, whole, steps=16)


def test_another_optimizer_begins_its_state_anew_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, anew = folder / "changed", "begins anew"

    def train(steps: int, optimizer: str) -> str:
        words = [f"train.steps={steps}", "checkpoint.interval=2", f"optimizer={optimizer}", "optimizer.may_change=true"]
        assert run_words(ParallelContext(), overrides(folder, run.name, *words)) == 0
        return capsys.readouterr().out

    def saved(step: int) -> set[str]:
        manifest = json.loads((run / "checkpoints" / f"step-{step:08d}" / MANIFEST).read_text())
        return {name for name in manifest["tensors"] if "mlp.down.weight" in name or name.startswith("optimizer.")}

    matrices = [f"blocks.{layer}.mlp.down.weight" for layer in (0, 1)]
    assert anew not in train(2, "adamw")
    assert f"{anew}: exp_avg, exp_avg_sq, step count of the checkpoint are dropped" in train(4, "muon")
    kinds = ("master", "ema", "momentum")  # the average of the weights goes on
    assert saved(4) == {"optimizer.step", *(f"{kind}.{name}" for kind in kinds for name in matrices)}
    assert anew not in train(6, "muon")
    assert f"{anew}: exp_avg, exp_avg_sq, momentum, step count of the checkpoint are dropped" in train(8, "adamw")
    assert not any(name.startswith("momentum.") for name in saved(8))
    words = overrides(folder, run.name, "train.steps=9", "optimizer=muon")
    with pytest.raises(UserError, match=r"started with optimizer\.name=adamw"):
        run_words(ParallelContext(), words)

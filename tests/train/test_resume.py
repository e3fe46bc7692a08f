"""Nothing is lost: a run that was killed or stopped ends exactly where the uninterrupted one ends, bit for bit."""

from pathlib import Path

import pytest

import pretrain_gpt
from megalite.config.compose import load_config
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from tests.ranks import run_ranks
from tests.train import runs
from tests.train.runs import finish, kill, launch, metrics, state_bytes, train_on_rank, wait_for_step
from tests.train.test_launch import launch_by_variables
from tests.train.test_run import stop_after

STEPS = 40


def overrides(folder: Path, run: str, *extra: str) -> list[str]:
    """With an average of the weights to carry on."""
    return runs.overrides(folder, run, "optimizer.ema_half_life_steps=5", *extra)


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


@pytest.mark.parametrize("pp", [2, pytest.param(1, marks=pytest.mark.long)])
def test_two_ranks_continue_after_one_of_them_is_killed(folder: Path, pp: int) -> None:
    """Stages of a pipeline, and replicas."""
    whole, broken = folder / f"whole-{pp}", folder / f"broken-{pp}"
    words = ("train.steps=16", f"parallel.pp={pp}", "train.eval_interval=8")
    layout = ParallelLayout(pp=pp, dp=2 // pp)
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

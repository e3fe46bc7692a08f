"""Runs whose batches grow and whose steps are passed over: each step takes its own samples, on any start and layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.reading import newest
from megalite.config.derive import derive
from megalite.config.schema import Config
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.train.build import needs_of
from megalite.train.history import read_metrics
from tests.ranks import run_ranks
from tests.train.runs import state_bytes, train_on_rank
from tests.train.test_run import UNREADABLE, _refusing_step_3, config_for, losses, resume_differs, run_on, start

RAMP = {"global_batch_size": 8, "batch_ramp": [2, 2, 24], "micro_batch_size": 1}  # larger from samples 8, 16 and 24 on
SIZES = [2, 2, 2, 2, 4, 4, 6, 6, 8, 8, 8, 8]  # of twelve steps
SKIPPED = [3, 6, 7, 12]


def growing(text: Path, run_dir: Path, **train: Any) -> Config:
    return config_for(text, run_dir, **RAMP, **train)


def test_tokens_count_what_each_step_trains_on(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(growing(text, tmp_path / "run", skip_steps=SKIPPED)) == 0
    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in record]
    trained = [step for step in range(1, 13) if step not in SKIPPED]
    assert [record["step"] for record in records] == trained
    assert [record["tokens"] for record in records] == [
        16 * sum(SIZES[step - 1] for step in trained if step <= last) for last in trained
    ]
    for record in records:
        size = SIZES[record["step"] - 1]
        assert record["tokens_per_s"] * record["step_time_s"] == pytest.approx(16 * size)
    printed = capsys.readouterr().out
    assert f"12 steps: {16 * sum(SIZES):,} tokens, " in printed
    assert "growing from 2 sequences by 2" in printed
    assert all(f"step {step}, skipped on request" in printed for step in SKIPPED)


def test_a_run_that_is_stopped_on_its_way_up_goes_on_as_if_it_was_not(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = growing(text, tmp_path, skip_steps=SKIPPED).train
    assert not resume_differs(text, tmp_path, monkeypatch, train=train)


def test_a_step_that_is_passed_over_changes_no_weight_and_no_moment(text: Path, tmp_path: Path) -> None:
    found = {}
    for name, steps, skipped in (("short", 5, []), ("longer", 7, [6, 7])):
        config = config_for(text, tmp_path / name, steps=steps, skip_steps=skipped)
        config.lr = replace(config.lr, schedule="constant", warmup_steps=1)
        assert start(config) == 0
        found[name] = state_bytes(tmp_path / name, steps)
    assert found["longer"] == found["short"]
    context = ParallelContext()
    state = newest(tmp_path / "longer" / "checkpoints", context, print)
    assert state is not None
    progress = state.state["progress"]
    assert (progress["step"], progress["samples"], progress["tokens"]) == (7, 4 * 7, 4 * 5 * 16)


def test_its_samples_are_those_that_nobody_trains_on(text: Path, tmp_path: Path) -> None:
    """The step after it sees what it would have seen."""
    whole, part = (config_for(text, tmp_path / name, steps=3) for name in ("whole", "part"))
    for config in (whole, part):
        config.optimizer = replace(config.optimizer, lr=1e-30)
        config.lr = replace(config.lr, schedule="constant")
        config.model = replace(config.model, dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
    part.train = replace(part.train, skip_steps=[2])
    assert start(whole) == start(part) == 0
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "part") == {1: expected[1], 3: expected[3]}
    assert expected[2] != expected[3]


def test_a_run_may_pass_over_all_that_remains_of_it(text: Path, tmp_path: Path) -> None:
    assert start(config_for(text, tmp_path / "run", steps=2, skip_steps=[1, 2])) == 0
    assert losses(tmp_path / "run") == {}
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def test_a_small_batch_that_one_rank_cannot_read_ends_all_with_its_message(text: Path, tmp_path: Path) -> None:
    """What stands in for it has as many microbatches as the other ranks of the model compute."""
    outcomes = run_on(ParallelLayout(tp=2), growing(text, tmp_path / "run"), _refusing_step_3)
    assert outcomes == [str(UserError(UNREADABLE))] * 2


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ParallelLayout(dp=2), id="dp2"),
        pytest.param(ParallelLayout(pp=2), id="pp2", marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_in_the_middle_of_its_ramp_on_another_layout(
    text: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    """In fp64, without dropout: the design's bound for another layout."""
    settings = growing(text, tmp_path / "whole", steps=9, skip_steps=SKIPPED[:3], eval_interval=0)
    settings.model = replace(settings.model, num_layers=2, dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
    settings.lr = replace(settings.lr, schedule="constant", warmup_steps=1)
    whole = replace(settings, precision="fp64")
    assert start(whole) == 0
    moved = replace(whole, run_dir=str(tmp_path / "moved"))
    assert start(replace(moved, train=replace(moved.train, steps=5))) == 0
    parallel = replace(moved.parallel, pp=layout.pp, timeout_s=20)
    config = derive(replace(moved, parallel=parallel), layout.world_size)
    assert run_ranks(train_on_rank, 2, config, layout=layout, needs=needs_of(config), timeout=40) == [0, 0]
    found, expected = losses(tmp_path / "moved"), losses(tmp_path / "whole")
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-10, abs=1e-12)

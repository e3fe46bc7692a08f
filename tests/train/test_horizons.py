"""Runs whose length is given in tokens, FLOPs or epochs: how they end, go on, and tell it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import megalite.train.loop as loop_module
from megalite.config.schema import Config
from megalite.config.settings import DERIVED
from megalite.train.history import read_metrics
from tests.train.test_run import checkpoints, config_for, losses, resume_differs, start, stop_after

BATCH = 4 * 16  # tokens


def lengthy(text: Path, run_dir: Path, **train: Any) -> Config:
    config = config_for(text, run_dir, steps=None, eval_interval=0, sample_tokens=0, **train)
    return replace(config, launch=replace(config.launch, status_file=str(run_dir) + ".status"))


def saved(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((run_dir / "config.yaml").read_text())
    return found


def test_a_run_ends_with_its_tokens_and_goes_on_with_more(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert start(lengthy(text, run, tokens=5 * BATCH - 1)) == 0
    assert [*losses(run)] == [1, 2, 3, 4, 5]
    assert (saved(run)["train"]["tokens"], saved(run)["train"]["steps"]) == (5 * BATCH - 1, 5)
    assert "train.steps" in saved(run)[DERIVED]
    assert json.loads(Path(f"{run}.status").read_text())["steps"] == 5
    assert "  length           5 steps: 320 tokens, " in capsys.readouterr().out
    assert start(lengthy(text, run, tokens=7 * BATCH)) == 0
    assert [*losses(run)] == [1, 2, 3, 4, 5, 6, 7]
    larger = lengthy(text, run, tokens=12 * BATCH, global_batch_size=8)
    assert larger.train.steps == 6, "what a new run would take"
    assert start(larger) == 0
    assert [*losses(run)] == [*range(1, 11)], "3 steps of 8 sequences take the 5 batches of 4 that are left"
    assert saved(run)["train"]["steps"] == 10
    said = capsys.readouterr().out
    assert "train.tokens is now 768; the run was at 448" in said
    assert "train.steps is now" not in said
    assert "  length           10 steps: 832 tokens, " in said
    assert start(lengthy(text, run, epochs=0.001)) == 0
    assert "already finished: step 10 of 10" in capsys.readouterr().out


@pytest.mark.parametrize("horizon", [{"tokens": 12 * BATCH}, {"epochs": 0.00723}, {"tokens_per_parameter": 0.09}])
def test_a_run_that_is_stopped_goes_on_as_if_it_was_not(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, horizon: dict[str, Any]
) -> None:
    train = config_for(text, tmp_path, steps=None, **horizon).train
    lr = config_for(text, tmp_path, steps=None, **horizon).lr
    assert not resume_differs(text, tmp_path, monkeypatch, train=train, lr=lr)
    rates = [line["lr"] for line in read_metrics(tmp_path / "parts" / "metrics.jsonl") if "loss" in line]
    assert rates[-1] == pytest.approx(1e-4), "the last step has the least rate: the schedule knows the length"


def test_warm_up_follows_from_a_length_that_only_the_data_tells(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start(lengthy(text, run, epochs=0.02)) == 0
    steps = len(losses(run))
    assert steps == saved(run)["train"]["steps"] > 12
    assert saved(run)["lr"]["warmup_steps"] == steps // 10 > 0
    found = json.loads(Path(run, "events.jsonl").read_text().splitlines()[0])["about"]
    [length] = [words for label, words in found if label == "length"]
    others = r"[\d.]+ tokens per parameter, [\d.]+e\d+ FLOPs, 0.02\d* epochs"
    assert re.fullmatch(f"{steps} steps: {steps * BATCH:,} tokens, {others}", length)


def test_intervals_in_tokens_hold_through_a_ramp_and_a_stop(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ramp = {"global_batch_size": 8, "batch_ramp": [2, 2, 24], "micro_batch_size": 1, "eval_interval_tokens": 200}
    config = config_for(text, tmp_path, eval_interval=100, **ramp)
    checkpoint = replace(config.checkpoint, interval=100, interval_tokens=300, keep=99)
    assert not resume_differs(text, tmp_path, monkeypatch, train=config.train, checkpoint=checkpoint)
    consumed, evaluated, kept = 0, [], []
    for step, size in enumerate([2, 2, 2, 2, 4, 4, 6, 6, 8, 8, 8, 8], start=1):
        before, consumed = consumed, consumed + 16 * size
        evaluated += [step] if consumed // 200 > before // 200 or step == 12 else []
        kept += [step] if consumed // 300 > before // 300 or step == 12 else []
    for run in ("whole", "parts"):
        lines = read_metrics(tmp_path / run / "metrics.jsonl")
        assert [line["step"] for line in lines if "val_loss" in line] == evaluated
    assert checkpoints(tmp_path / "whole") == kept
    assert checkpoints(tmp_path / "parts") == sorted({*kept, 6}), "the stop saved, too"


def test_an_evaluation_by_tokens_that_a_stop_broke_off_is_made_up_for(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After step 7, 64 tokens each: 448 is the first number past 400."""
    config = config_for(text, tmp_path / "run", eval_interval=100, eval_interval_tokens=200)
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "evaluate", lambda *arguments: None)
        stop_after(6, patch)
        assert start(config) == 0
    assert [*losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, 7]
    assert start(config) == 0
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "val_loss" in line] == [7, 10, 12]

"""Runs whose length is given in tokens, FLOPs or epochs: how they end, go on, and tell it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from megalite.config.schema import Config
from megalite.config.settings import DERIVED
from megalite.train.history import read_metrics
from tests.train.test_run import config_for, losses, resume_differs, start

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

"""Sizes of updates in a real run are those of its checkpoints, and training does not notice that it is measured."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt
from megalite.layout.ranks import GroupNeeds, ParallelLayout
from megalite.observe.run_data import read_run
from megalite.train.history import UPDATE_SIZES
from tests.ranks import run_ranks
from tests.train.runs import metrics, overrides, state_bytes
from tests.train.test_ema import saved
from tests.train.test_resume import run_words

SHORT = (
    "train.steps=5",
    "train.log_interval=2",
    "train.eval_interval=0",
    "train.sample_tokens=0",
    "checkpoint.interval=1",
    "checkpoint.keep=5",
    "log.wandb=disabled",
)


def run(folder: Path, name: str, *extra: str) -> Path:
    assert pretrain_gpt.main(overrides(folder, name, *SHORT, *extra)) == 0
    return folder / name


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("settings", [["optimizer=adamw"], ["optimizer=muon", "precision=bf16"]], ids=str)
def test_lines_hold_what_two_checkpoints_differ_by_and_training_is_the_same(
    folder: Path, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In bf16 the masters are not the parameters. The terminal shows nothing of it."""
    name = settings[0].partition("=")[2]
    measured = run(folder, f"{name}-measured", "log.update_sizes=true", *settings)
    plain = run(folder, f"{name}-plain", *settings)
    assert not re.search("update_rms|block_", capsys.readouterr().out)
    assert metrics(measured) == metrics(plain)
    for step in (1, 5):
        assert state_bytes(measured, step) == state_bytes(plain, step)
    assert not any(key in line for line in lines_of(plain) for key in UPDATE_SIZES)
    lines = lines_of(measured)
    assert [line["step"] for line in lines] == [2, 4, 5]
    for line in lines:
        before, after = (
            {name: value.double() for name, value in saved(measured, step, "master").items()}
            for step in (line["step"] - 1, line["step"])
        )
        for layer in range(2):
            its = [name for name in after if name.startswith(f"blocks.{layer}.")]
            update = torch.cat([(after[name] - before[name]).flatten() for name in its])
            weights = torch.cat([after[name].flatten() for name in its])
            found = [line[name][f"block_{layer}"] for name in ("update_rms", "update_norm", "weight_rms")]
            wanted = [update.norm() / len(update) ** 0.5, update.norm(), weights.norm() / len(weights) ** 0.5]
            assert found == [pytest.approx(float(value), rel=1e-5) for value in wanted]
    shown = read_run(measured)
    assert shown.damage == []
    assert len(shown.series["relative_update/block_1"].points()) == 3


def test_a_stage_without_parameters_measures_as_others_do(folder: Path) -> None:
    """It has no copy, and takes part in the sum all the same."""
    stages = "parallel.pp=3", "parallel.pipeline_layout=Et||tL", "parallel.timeout_s=60"
    words = overrides(folder, "empty", *SHORT, "log.update_sizes=true", "train.steps=2", "model.dropout=0", *stages)
    layout, needs = ParallelLayout(pp=3), GroupNeeds(tied_embeddings=True)
    assert run_ranks(run_words, 3, words, layout=layout, needs=needs, timeout=120) == [0] * 3
    alone = run(folder, "alone", "log.update_sizes=true", "train.steps=2", "model.dropout=0")
    [line], [wanted] = lines_of(folder / "empty"), lines_of(alone)
    for name in UPDATE_SIZES:
        assert line[name] == pytest.approx(wanted[name], rel=1e-4)


def test_a_line_of_a_step_that_is_passed_over_has_no_sizes(folder: Path) -> None:
    passed = run(folder, "passed", "log.update_sizes=true", "train.steps=4", "train.skip_steps=[2]")
    assert [[name in line for name in UPDATE_SIZES] for line in lines_of(passed)] == [[False] * 6, [True] * 6]

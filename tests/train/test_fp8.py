"""Runs with fp8 learn as those without, go on from either, and say what a CPU does."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.train.runs import finish, launch, metrics

RECIPES = ("tensorwise", "rowwise")


def losses(folder: Path, run: str, steps: int, batch: int, *settings: str) -> list[float]:
    """Of a small model on a real text, that of asyncio."""
    arguments = [
        f"run_dir={folder / run}",
        "data=text",
        f"data.path={Path(asyncio.__file__).parent / '*.py'}",
        f"data.cache_dir={folder / 'cache'}",
        *("tokenizer=byte", "device=cpu", "model.num_layers=4", "model.hidden_size=64"),
        *(f"train.global_batch_size={batch}", f"train.micro_batch_size={batch}", "train.seq_length=64"),
        f"train.steps={steps}",
        *("train.eval_interval=0", "train.sample_tokens=0", "checkpoint.interval=0", "optimizer.lr=1e-3"),
        *("log.report_interval_s=0", "lr.schedule=constant", "lr.warmup_steps=20"),
        *settings,
    ]
    status, output = finish(launch(arguments), timeout=600)
    assert status == 0, output
    assert ("a CPU imitates fp8" in output) == any("train.fp8" in setting for setting in settings)
    return [float(record["loss"]) for record in metrics(folder / run)]


def farthest(found: Sequence[float], wanted: Sequence[float], width: int) -> float:
    """The largest relative difference between means of `width` steps: those of single steps are noise."""
    assert len(found) == len(wanted) > 0
    starts = range(0, len(wanted), width)
    return max(abs(sum(found[at : at + width]) / sum(wanted[at : at + width]) - 1) for at in starts)


def compare(folder: Path, steps: int, batch: int, width: int, bound: float) -> None:
    plain = {name: losses(folder, name, steps, batch, f"precision={name}") for name in ("fp32", "bf16")}
    assert plain["fp32"][-1] < 0.7 * plain["fp32"][0]
    for recipe in (*RECIPES, *(f"{recipe} train.fp8_weight_gradients=true" for recipe in RECIPES)):
        settings = f"precision=bf16 train.fp8={recipe}".split()
        found = losses(folder, recipe.split("=")[0], steps, batch, *settings)
        assert found != plain["bf16"]
        far = {name: farthest(found, wanted, width) for name, wanted in plain.items()}
        print(recipe, far, found[-1])
        assert max(far.values()) < bound, (recipe, far)


def test_the_first_steps_are_those_of_bf16_and_fp32(tmp_path: Path) -> None:
    compare(tmp_path, steps=60, batch=4, width=20, bound=0.001)  # few tokens, for CPUs without bf16 instructions


@pytest.mark.long
def test_the_losses_of_500_steps_are_those_of_bf16_and_fp32(tmp_path: Path) -> None:
    compare(tmp_path, steps=500, batch=16, width=50, bound=0.005)


def test_a_run_goes_on_with_fp8_and_says_so(tmp_path: Path) -> None:
    before = losses(tmp_path, "run", 20, 4, "precision=bf16")
    arguments = ["train.steps=22", "precision=bf16", "train.fp8=rowwise", f"run_dir={tmp_path / 'run'}"]
    status, output = finish(launch(arguments))
    assert status == 0, output
    assert "train.fp8 is now rowwise; the run was at null" in output
    assert [float(record["loss"]) for record in metrics(tmp_path / "run")][:20] == before
    assert len(metrics(tmp_path / "run")) == 22

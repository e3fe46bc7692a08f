"""An average of the weights beside a real run: training does not notice it, and what takes it has it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import pretrain_gpt
from megalite.commands import models
from megalite.hf.saved_model import import_model, open_model
from megalite.layout.ranks import GroupNeeds, ParallelLayout
from megalite.model.parameters import gpt_parameters
from megalite.train.saving import kind_of
from tests.ranks import run_ranks
from tests.train.runs import metrics, overrides
from tests.train.test_resume import run_words

EMA = "optimizer.ema_half_life_steps=2"
SHORT = (
    "train.steps=6",
    "train.eval_interval=3",
    "checkpoint.interval=3",
    "train.sample_tokens=0",
    "log.wandb=disabled",
)


def run(folder: Path, name: str, *extra: str) -> Path:
    assert pretrain_gpt.main(overrides(folder, name, *SHORT, *extra)) == 0
    return folder / name


def saved(run: Path, step: int, kind: str) -> dict[str, Tensor]:
    """The tensors of that kind in a checkpoint, by parameter, without rows that pad the vocabulary."""
    model = open_model(run, step)
    read = {one.name: model.read(f"{kind}.{one.name}", one.shape) for one in gpt_parameters(model.config.model)}
    return without_padding(read)


def without_padding(read: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:257] if name.startswith(("embedding", "head")) else value for name, value in read.items()}


def kinds(run: Path) -> set[str]:
    found = open_model(run).found
    assert found is not None
    return {kind_of(name) for name in found.manifest.tensors}


def evaluations(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "val_loss" in line]


def figures(run: Path) -> list[dict[str, Any]]:
    """Of a run with an average and of one without."""
    return [{name: value for name, value in line.items() if name != "val_loss_ema"} for line in metrics(run)]


@pytest.fixture(scope="module")
def with_average(folder: Path) -> Path:
    return run(folder, "with", EMA)


@pytest.fixture(scope="module")
def without(folder: Path) -> Path:
    return run(folder, "without")


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_training_does_not_notice_it(with_average: Path, without: Path, folder: Path) -> None:
    """Evaluations put the averages in the place of masters, or of rounded parameters, and take them out again."""
    rounded = run(folder, "rounded", EMA, "precision=bf16"), run(folder, "plain", "precision=bf16")
    for one, other in ((with_average, without), rounded):
        assert figures(one) == figures(other)
        for kind in ("master", "exp_avg_sq"):
            assert_same_weights(saved(one, 6, kind), saved(other, 6, kind))
        losses = [(line["val_loss"], line["val_loss_ema"]) for line in evaluations(one)]
        assert len(losses) == 2
        assert all(1e-4 < abs(loss - average) < 1.0 for loss, average in losses)


def test_it_is_evaluated_and_exported_and_writes_text(
    with_average: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in evaluations(with_average):
        for ema, name in (([], "val_loss"), (["--ema"], "val_loss_ema")):
            assert models.evaluate([str(with_average), "--step", str(line["step"]), "--json", *ema]) == 0
            assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(line[name], rel=1e-6)
    out = folder / "exported"
    assert models.export([str(with_average), str(out), "--ema"]) == 0
    assert "after step 6, averaged weights" in capsys.readouterr().out
    averages = saved(with_average, 6, "ema")
    assert_same_weights(without_padding(dict(import_model(out, open_model(with_average).config.model))), averages)
    assert not any(torch.equal(value, averages[name]) for name, value in saved(with_average, 6, "master").items())
    assert load_file(out / "model.safetensors")
    card, newest = (out / "README.md").read_text(), evaluations(with_average)[-1]
    assert f"| validation, of these averages | {newest['val_loss_ema']:.4f} |" in card
    assert "with a half-life of 2 steps" in card
    assert f"| {newest['val_loss']:.4f} |" not in card
    texts = []
    for words in ([str(with_average), "--ema"], [str(out)], [str(with_average)]):
        assert models.generate([*words, "--prompt", "The river", "--max-new-tokens", "20", "--temperature", "9"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert models.generate([str(out), "--prompt", "The", "--ema"]) == 2
    assert "has one set of weights" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "generate", "export"])
def test_a_checkpoint_without_it_is_refused(
    command: str, without: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"generate": ["--prompt", "a"], "export": [str(tmp_path / "out")]}.get(command, [])
    assert getattr(models, command)([str(without), *words, "--ema"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "--ema: the checkpoint of step 6 has no averages" in said.err
    assert not (tmp_path / "out").exists()


def test_a_run_switches_it_on_and_off_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "switched"
    run(folder, name, "train.steps=3")
    assert "ema" not in kinds(folder / name)
    run(
        folder,
        name,
        "train.steps=4",
        "optimizer.ema_half_life_steps=1",
        "checkpoint.interval=1",
        "train.eval_interval=1",
    )
    assert "the average of the weights begins with those of the checkpoint" in capsys.readouterr().out
    before, after, averages = (
        saved(folder / name, 3, "master"),
        *(saved(folder / name, 4, kind) for kind in ("master", "ema")),
    )
    for parameter, average in averages.items():  # half the way
        torch.testing.assert_close(average, (before[parameter] + after[parameter]) / 2, rtol=1e-6, atol=1e-9)
    run(folder, name, "train.steps=5", "optimizer.ema_half_life_steps=null")
    assert "the average of the weights of the checkpoint is dropped" in capsys.readouterr().out
    assert "ema" not in kinds(folder / name)
    assert ["val_loss_ema" in line for line in evaluations(folder / name)] == [False, True, False]


def test_a_run_that_ends_in_an_evaluation_saves_what_it_had(
    folder: Path, monkeypatch: pytest.MonkeyPatch, with_average: Path
) -> None:
    """Here a batch of the second pass, with the averages in the place of the masters, cannot be read."""
    from megalite.errors.problems import Problem, UserError
    from megalite.train import loop

    calls, evaluate = [], loop.evaluate

    def refuses(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise UserError(Problem("data", "x", "is gone"))
        return evaluate(*args)

    monkeypatch.setattr(loop, "evaluate", refuses)
    assert pretrain_gpt.main(overrides(folder, "ended", *SHORT, EMA)) == 2
    for kind in ("master", "ema"):
        assert_same_weights(saved(folder / "ended", 3, kind), saved(with_average, 3, kind))


def test_a_stage_without_parameters_evaluates_twice_as_others_do(folder: Path) -> None:
    stages = "parallel.pp=3", "parallel.pipeline_layout=Et||tL", "parallel.timeout_s=60"
    words = overrides(folder, "empty", *SHORT, EMA, "train.steps=1", *stages)
    layout, needs = ParallelLayout(pp=3), GroupNeeds(tied_embeddings=True)
    assert run_ranks(run_words, 3, words, layout=layout, needs=needs, timeout=120) == [0] * 3
    assert ["val_loss_ema" in line for line in evaluations(folder / "empty")] == [True]

"""A step that is not finite, or empty, is not applied; weights that are not finite are not saved."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import megalite.data.batches as batches_module
from megalite.config.schema import Config
from megalite.data.batch import Batch
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.model.gpt import GPT
from megalite.train.history import read_events, read_metrics
from megalite.train.step import PendingMetrics, TrainStep
from tests.train.runs import outcome, state_bytes
from tests.train.test_run import STEPS, checkpoints, config_for, kinds, losses, run_on, start


def poison(samples: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the microbatches that start with these samples is NaN."""
    loss = GPT.loss

    def poisoned(self: GPT, batch: Batch, scale: Tensor, received: Tensor | None = None) -> Tensor:
        value = loss(self, batch, scale, received)
        return value * math.nan if int(batch.samples[0]) in samples and self.training else value

    monkeypatch.setattr(GPT, "loss", poisoned)


def test_a_step_that_is_not_finite_is_counted_and_not_applied(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison({4 * 4 + 2}, monkeypatch)  # the second microbatch of step 5
    assert start(config_for(text, tmp_path / "run")) == 0
    records = {r["step"]: r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r}
    assert math.isnan(records[5]["loss"])
    assert records[4]["bad_steps"] == 0
    assert records[12]["bad_steps"] == 1
    assert [records[step]["tokens"] for step in (4, 5, 12)] == [4 * 64, 4 * 64, 11 * 64], "only what was applied"
    assert all(math.isfinite(record["loss"]) for step, record in records.items() if step != 5)
    assert "step 5, skipped: loss " in capsys.readouterr().out


def test_too_many_bad_steps_in_a_row_stop_the_run_with_the_checkpoint_intact(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(set(range(4 * 5, 1000)), monkeypatch)  # from step 6 on
    config = config_for(text, tmp_path / "run", max_bad_steps=3)
    assert start(config) == 1
    message, page = capsys.readouterr().err, (tmp_path / "run" / "report.html").read_text()
    assert "checkpoint of step 4 is intact" in message
    assert "optimizer.lr" in message
    for told in (message, read_events(tmp_path / "run" / "events.jsonl")[-1]["message"], page):
        assert "3 steps in a row" in told
    assert ">failed<" in page
    bad = [("skipped", step) for step in (6, 7, 8)]
    assert kinds(tmp_path / "run") == [("start", 0), ("checkpoint", 4), *bad, ("failed", 8)]
    monkeypatch.undo()
    assert start(config) == 0
    assert max(losses(tmp_path / "run")) == STEPS
    assert all(map(math.isfinite, losses(tmp_path / "run").values()))
    poison(set(range(4 * 5, 1000)), monkeypatch)
    fp16 = replace(config_for(text, tmp_path / "fp16", max_bad_steps=3), precision="fp16")
    assert start(fp16) == 0, "its loss scale is looked for"


def test_a_step_without_a_token_in_the_loss_changes_nothing_and_is_no_bad_one(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def config(name: str, steps: int) -> Config:
        found = config_for(text, tmp_path / name, steps=steps, max_bad_steps=1)
        return replace(found, lr=replace(found.lr, schedule="constant", warmup_steps=2))

    assert start(config("four", 4)) == 0
    read = batches_module.local_batches

    def all_masked(source: Any, config: Config, samples: range, *others: Any) -> list[Batch]:
        found = read(source, config, samples, *others)
        return [it.with_mask(it.loss_mask & (samples.start != 4 * 4)) for it in found]

    monkeypatch.setattr(batches_module, "local_batches", all_masked)
    assert start(config("five", 5)) == 0
    assert "step 5, empty" in capsys.readouterr().out
    assert state_bytes(tmp_path / "five", 5) == state_bytes(tmp_path / "four", 4)
    assert max(losses(tmp_path / "five")) == 4
    assert start(config("five", 6)) == 0
    assert losses(tmp_path / "five")[6] > 0
    seldom = config("seldom", 5)
    assert start(replace(seldom, train=replace(seldom.train, log_interval=3))) == 0
    assert [*losses(tmp_path / "seldom")] == [3, 4], "the steps since the last line have one"


def test_checkpoints_of_weights_that_give_no_loss_replace_no_good_one(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(set(range(4 * 6, 1000)), monkeypatch)  # from step 7 on: step 6 has ruined the weights
    config = config_for(text, tmp_path / "run", max_bad_steps=5)
    config.checkpoint = replace(config.checkpoint, interval=2, keep=1)
    assert start(config) == 1
    assert checkpoints(tmp_path / "run") == [4, 10]
    said = capsys.readouterr().err
    assert "The checkpoint of step 4 is intact; to go on from there, move those of steps [10] out of" in said


def test_a_run_that_ends_with_bad_steps_says_what_now(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(config_for(text, tmp_path / "good")) == 0
    assert "bad step" not in capsys.readouterr().err
    poison(set(range(4 * 7, 1000)), monkeypatch)  # from step 8 on: step 7 has ruined the weights
    assert start(config_for(text, tmp_path / "run", max_bad_steps=6)) == 0
    said = capsys.readouterr().err
    assert "the run ends with 5 bad steps: loss or gradient was not finite, nothing was applied" in said
    assert "The checkpoint of step 4 is intact; to go on from there, move those of steps [12, 8] out of" in said
    assert "Try a lower optimizer.lr" in said


@pytest.mark.parametrize("asynchronous", [False, True])
def test_weights_that_are_not_finite_are_never_saved_and_the_run_has_failed(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], asynchronous: bool
) -> None:
    good = config_for(text, tmp_path / "run", steps=5)
    good.checkpoint = replace(good.checkpoint, asynchronous=asynchronous, keep=1)
    assert start(good) == 0
    longer = replace(good, train=replace(good.train, steps=STEPS), lr=replace(good.lr, steps=STEPS))
    ruinous = replace(longer, optimizer=replace(good.optimizer, lr=1e308))
    assert start(ruinous) == 1
    said = capsys.readouterr().err
    assert "the state after step 8 is not finite (master." in said
    assert "The checkpoint of step 5 is intact. Try a lower optimizer.lr" in said
    assert checkpoints(tmp_path / "run") == [4, 5]
    assert start(longer) == 0
    assert max(losses(tmp_path / "run")) == STEPS


def _ruined_by_the_last_step(context: ParallelContext, config: Config) -> int | str:
    take_step, taken = TrainStep.__call__, []

    def and_ruin(self: TrainStep, *args: Any, **kwargs: Any) -> PendingMetrics:
        launched = take_step(self, *args, **kwargs)
        taken.append(None)
        if len(taken) == STEPS:
            self._training.optimizer.exp_avg_sq[0].fill_(math.inf)
        return launched

    if context.rank == 1:
        TrainStep.__call__ = and_ruin  # type: ignore[method-assign]
    return outcome(context, config)


def test_what_is_not_finite_on_one_rank_alone_fails_the_run_on_all(text: Path, tmp_path: Path) -> None:
    config = config_for(text, tmp_path / "run", eval_interval=0)
    config.optimizer = replace(config.optimizer, zero=1)
    assert run_on(ParallelLayout(dp=2), config, _ruined_by_the_last_step) == [1, 1]
    assert checkpoints(tmp_path / "run") == []
    assert "is not finite (exp_avg_sq." in (tmp_path / "run" / "events.jsonl").read_text()

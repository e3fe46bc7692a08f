"""One run in this process: what a resume needs, and what happens to a step that is not finite.

And a few on ranks that are made here: what one of them refuses, or holds other than it should, ends all of them.
"""

import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megalite.train.job as job_module
import megalite.train.reporter as reporter_module
import megalite.train.run as run_module
from megalite.checkpoint.run_folder import RunFolder
from megalite.config.derive import derive
from megalite.config.problems import Problem, UserError
from megalite.config.schema import Config, OptimizerConfig
from megalite.data.batch import Batch
from megalite.data.batches import StepBatches, TrainBatches, validation_batches
from megalite.data.tokenizers import load_tokenizer
from megalite.model.gpt import GPT
from megalite.parallel.context import ParallelContext
from megalite.parallel.environment import ProcessEnvironment, read_environment
from megalite.parallel.layout import ParallelLayout
from megalite.train.metrics import read_metrics
from megalite.train.run import run
from megalite.train.step import LaunchedStep, TrainStep
from tests.ranks import run_ranks
from tests.train.runs import state_bytes, write_text

STEPS = 12


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("run") / "text.txt")


def config_for(text: Path, run_dir: Path, **train: Any) -> Config:
    config = Config(run_dir=str(run_dir), tokenizer="byte", device="cpu", precision="fp32")
    config.data = replace(config.data, source="text", path=str(text), cache_dir=str(text.parent / "cache"), workers=1)
    config.model = replace(config.model, num_layers=1, hidden_size=16, num_attention_heads=2, dropout=0.1)
    shape = {"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 2, "seq_length": 16, "sample_tokens": 4}
    evaluation = {"eval_interval": 4, "eval_batches": 1}
    config.train = replace(config.train, **{**shape, **evaluation, **train})
    config.checkpoint = replace(config.checkpoint, interval=4)
    return derive(config)


def start(config: Config) -> int:
    return run(config, read_environment({}))


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask this process to stop once it has reported `step`."""
    report = reporter_module.Reporter.step

    def and_stop(self: Any, progress: Any, *args: Any, **kwargs: Any) -> None:
        report(self, progress, *args, **kwargs)
        if progress.step == step:
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(reporter_module.Reporter, "step", and_stop)


def losses(run_dir: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(run_dir / "metrics.jsonl") if "loss" in record}


def resume_differs(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> bool:
    """Whether a run that was stopped and continued differs from one that was not."""
    whole, parts = (replace(config_for(text, tmp_path / name), **changes) for name in ("whole", "parts"))
    assert start(whole) == 0
    with monkeypatch.context() as patch:
        stop_after(6, patch)
        assert start(parts) == 0
    assert max(losses(tmp_path / "parts")) < STEPS
    assert start(parts) == 0
    same_losses = losses(tmp_path / "parts") == losses(tmp_path / "whole")
    return not (same_losses and state_bytes(tmp_path / "parts", STEPS) == state_bytes(tmp_path / "whole", STEPS))


def test_a_stopped_and_continued_run_equals_the_uninterrupted_one(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not resume_differs(text, tmp_path, monkeypatch)


FP16 = {"precision": "fp16", "optimizer": OptimizerConfig(loss_scale_window=4, initial_loss_scale=2.0**12)}


def test_a_continued_fp16_run_has_the_loss_scale_of_the_uninterrupted_one(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows every four steps, of which some are on either side of the stop."""
    assert not resume_differs(text, tmp_path, monkeypatch, **FP16)
    scales = [r["loss_scale"] for r in read_metrics(tmp_path / "parts" / "metrics.jsonl") if "loss" in r]
    assert scales == [2.0 ** (12 + step // 4) for step in range(STEPS)]


def test_a_loss_scale_that_does_not_come_back_is_noticed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = job_module.checkpoint_state
    monkeypatch.setattr("megalite.train.saving.checkpoint_state", lambda job: {**state(job), "loss_scale": None})
    start(replace(config_for(text, tmp_path / "parts", steps=6), **FP16))
    assert start(replace(config_for(text, tmp_path / "parts"), **FP16)) == 0
    scales = [r["loss_scale"] for r in read_metrics(tmp_path / "parts" / "metrics.jsonl") if "loss" in r]
    assert scales != [2.0 ** (12 + step // 4) for step in range(STEPS)]


@pytest.mark.parametrize("dropped", ["exp_avg", "exp_avg_sq", "master", "optimizer"])
def test_dropping_one_piece_of_state_is_noticed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropped: str
) -> None:
    """The negative control of every resume test: tensors of one kind are read into nowhere."""
    pieces_of = job_module.training_pieces

    def incomplete(*args: Any) -> list[Any]:
        return [
            replace(piece, tensor=piece.tensor.clone()) if piece.name.split(".")[0] == dropped else piece
            for piece in pieces_of(*args)
        ]

    monkeypatch.setattr(job_module, "training_pieces", incomplete)
    assert resume_differs(text, tmp_path, monkeypatch)


def poison(samples: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the microbatches that start with these samples is NaN."""
    loss = GPT.loss

    def poisoned(self: GPT, batch: Batch, scale: Tensor, received: Tensor | None = None) -> Tensor:
        value = loss(self, batch, scale, received)
        return value * math.nan if batch.first_sample in samples and self.training else value

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
    assert all(math.isfinite(record["loss"]) for step, record in records.items() if step != 5)
    assert "step 5: loss or gradient is not finite" in capsys.readouterr().out


def test_too_many_bad_steps_in_a_row_stop_the_run_with_the_checkpoint_intact(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(set(range(4 * 5, 1000)), monkeypatch)  # from step 6 on
    config = config_for(text, tmp_path / "run", max_bad_steps=3)
    assert start(config) == 1
    message = capsys.readouterr().err
    assert "3 steps in a row" in message
    assert "checkpoint of step 4 is intact" in message
    assert "optimizer.lr" in message
    monkeypatch.undo()
    assert start(config) == 0
    assert max(losses(tmp_path / "run")) == STEPS
    assert all(map(math.isfinite, losses(tmp_path / "run").values()))


def test_no_steps_leave_the_start_values_as_a_checkpoint(text: Path, tmp_path: Path) -> None:
    assert start(config_for(text, tmp_path / "run", steps=0)) == 0
    assert (tmp_path / "run" / "checkpoints" / "step-00000000").is_dir()


def test_the_same_seed_gives_the_same_run_and_another_seed_another(text: Path, tmp_path: Path) -> None:
    first, second = config_for(text, tmp_path / "first"), config_for(text, tmp_path / "second")
    other = replace(config_for(text, tmp_path / "other"), seed=99)
    for config in (first, second, other):
        assert start(config) == 0
    assert losses(tmp_path / "first") == losses(tmp_path / "second")
    assert losses(tmp_path / "first") != losses(tmp_path / "other")


def test_a_save_that_fails_does_not_end_training(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import megalite.train.saving as saving_module

    save = saving_module.save

    def full_at_step_4(folder: Path, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == 4:
            raise saving_module.CheckpointError("the checkpoint of step 4 was not saved: no space left on device")
        return save(folder, step, *args, **kwargs)

    monkeypatch.setattr(saving_module, "save", full_at_step_4)
    assert start(config_for(text, tmp_path / "run")) == 0
    assert "no space left" in capsys.readouterr().out
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))] == [
        "step-00000008",
        "step-00000012",
    ]


def test_bf16_trains_with_fp32_masters(text: Path, tmp_path: Path) -> None:
    config = replace(config_for(text, tmp_path / "run", steps=60), precision="bf16")
    assert start(config) == 0
    values = losses(tmp_path / "run")
    assert values[60] < values[1] - 0.5
    assert torch.get_default_dtype() == torch.float32


def test_a_run_may_go_on_in_another_precision(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 parameters are rounded masters, so a checkpoint of either precision holds what the other needs."""
    config = config_for(text, tmp_path / "run", steps=4)
    for steps, precision in ((4, "bf16"), (8, "fp32"), (STEPS, "bf16")):
        config = replace(config, precision=precision, train=replace(config.train, steps=steps))
        assert start(config) == 0
    assert max(losses(tmp_path / "run")) == STEPS
    assert "precision is now 'bf16'; the run was at 'fp32'" in capsys.readouterr().out


def test_the_run_keeps_its_tokenizer(text: Path, tmp_path: Path) -> None:
    assert start(config_for(text, tmp_path / "run", steps=1)) == 0
    tokenizer = load_tokenizer(tmp_path / "run" / "tokenizer")
    assert tokenizer.decode(tokenizer.encode("tree river")) == "tree river"


def test_a_start_that_is_refused_late_lets_go_of_the_run_folder(text: Path, tmp_path: Path) -> None:
    config = config_for(text, tmp_path / "run", steps=4)
    assert start(config) == 0
    for manifest in (tmp_path / "run" / "checkpoints").glob("*/COMMIT.json"):
        manifest.write_text("{}")
    with pytest.raises(UserError, match="no checkpoint of this run can be read"):
        start(config)
    assert (tmp_path / "run" / "lock").read_text() == ""


def test_a_run_that_another_job_has_taken_over_ends(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RunFolder, "owned", lambda self: False)
    assert start(config_for(text, tmp_path / "run")) == 1
    assert "Another job writes to this run folder now" in capsys.readouterr().err
    assert max(losses(tmp_path / "run")) == 4, "it ends at the first save, not after the last step"


UNREADABLE = Problem("data.path", "text.txt", "cannot be read on rank 1", "mend it")
LAYOUTS = [ParallelLayout(dp=2), ParallelLayout(tp=2), ParallelLayout(tp=2, dp=2)]


def run_on(layout: ParallelLayout, config: Config, function: Any) -> list[Any]:
    """The outcomes of `function(context, config)` of all ranks."""
    parallel = replace(config.parallel, tp=layout.tp, timeout_s=20)
    config = derive(replace(config, parallel=parallel, checkpoint=replace(config.checkpoint, interval=0)))
    return run_ranks(function, layout.world_size, config, layout=layout, timeout=40)


def _outcome(context: ParallelContext, config: Config) -> int | str:
    """The exit status of one rank of a run, or what it refused."""
    try:
        return run(config, ProcessEnvironment(context.rank, context.world_size, context.rank, context.world_size))
    except UserError as error:
        return str(error)


def _refusing_step_3(context: ParallelContext, config: Config) -> int | str:
    following = TrainBatches.__next__
    asked: list[None] = []

    def refuse(self: TrainBatches) -> StepBatches:
        asked.append(None)
        if len(asked) >= 3:
            raise UserError(UNREADABLE)
        return following(self)

    if context.rank == 1:
        TrainBatches.__next__ = refuse  # type: ignore[method-assign]
    return _outcome(context, config)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["dp2", "tp2", "tp2-dp2"])
def test_a_batch_that_one_rank_cannot_read_ends_all_with_its_message(
    text: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    config = config_for(text, tmp_path / "run")
    outcomes = run_on(layout, config, _refusing_step_3)
    assert outcomes == [str(UserError(UNREADABLE))] * layout.world_size
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000002"]


def _refusing_the_second_validation_batch(context: ParallelContext, config: Config) -> int | str:
    def refuse(*args: Any, **kwargs: Any) -> Iterator[list[Batch]]:
        yield next(validation_batches(*args, **kwargs))
        raise UserError(UNREADABLE)

    if context.rank == 1:
        run_module.validation_batches = refuse
    return _outcome(context, config)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["dp2", "tp2", "tp2-dp2"])
def test_a_validation_batch_that_one_rank_cannot_read_ends_all_with_its_message(
    text: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    config = config_for(text, tmp_path / "run", eval_batches=3)
    outcomes = run_on(layout, config, _refusing_the_second_validation_batch)
    assert outcomes == [str(UserError(UNREADABLE))] * layout.world_size
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000004"]


def _drifting(context: ParallelContext, config: Config) -> int | str:
    take_step = TrainStep.__call__

    def and_drift(self: TrainStep, *args: Any, **kwargs: Any) -> LaunchedStep:
        launched = take_step(self, *args, **kwargs)
        self._training.buffers.masters[0] += 1
        return launched

    if context.rank == 3:
        TrainStep.__call__ = and_drift  # type: ignore[method-assign]
    return _outcome(context, config)


def test_a_rank_that_drifts_from_its_replicas_stops_all(text: Path, tmp_path: Path) -> None:
    """Rank 0 shares nothing with rank 3 that differs: it learns of it all the same."""
    config = config_for(text, tmp_path / "run", check_replicas_every=3, eval_interval=0)
    assert run_on(ParallelLayout(tp=2, dp=2), config, _drifting) == [1] * 4
    assert max(losses(tmp_path / "run")) == 3

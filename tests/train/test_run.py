"""One run in this process: what a resume needs, and what happens to a step that is not finite.

And a few on ranks that are made here: what one of them refuses, or holds other than it should, ends all of them.
"""

import gc
import json
import os
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import megalite.data.batches as batches_module
import megalite.train.loop as loop_module
import megalite.train.run as run_module
import megalite.train.saving as saving_module
from megalite.checkpoint.remote import Remote
from megalite.checkpoint.run_folder import RunFolder
from megalite.commands.train import train_rank
from megalite.config.derive import derive
from megalite.config.schema import Config, OptimizerConfig
from megalite.data.batch import Batch
from megalite.data.batches import StepBatches
from megalite.errors.problems import Problem, UserError
from megalite.launch.context import ParallelContext
from megalite.launch.process import ProcessEnvironment
from megalite.launch.watchdog import Watchdog
from megalite.layout.ranks import ParallelLayout
from megalite.optim.adamw import FlatAdamW
from megalite.optim.schedule import learning_rate
from megalite.train.history import RunLog, read_events, read_metrics
from megalite.train.metrics import Meter, StepMetrics
from megalite.train.step import PendingMetrics, TrainStep
from tests.ranks import run_ranks
from tests.train.runs import metrics, outcome, state_bytes

STEPS = 12


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
    return train_rank(config, ProcessEnvironment())


def at_step(step: int, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `action` when the metrics of `step` have been read."""
    add = Meter.add

    def and_act(self: Meter, metrics: StepMetrics, data: StepBatches) -> None:
        add(self, metrics, data)
        if data.planned.step == step:
            action()

    monkeypatch.setattr(Meter, "add", and_act)


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask this process to stop after `step`."""
    at_step(step, lambda: os.kill(os.getpid(), signal.SIGUSR1), monkeypatch)


def losses(run_dir: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(run_dir / "metrics.jsonl") if "loss" in record}


def kinds(run_dir: Path) -> list[tuple[str, int]]:
    """The events of a run, but for measurements and samples, and their steps."""
    events = read_events(run_dir / "events.jsonl")
    return [(it["kind"], it["step"]) for it in events if it["kind"] not in ("ranks", "sample")]


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


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


def test_a_run_that_has_ended_leaves_no_model_in_memory(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, seen = run_module.train, list[weakref.ref[Any]]()

    def and_remember(job: loop_module.Job) -> None:
        train(job)
        seen.extend(map(weakref.ref, (job, job.training, job.training.buffers)))

    monkeypatch.setattr(run_module, "train", and_remember)
    assert start(config_for(text, tmp_path / "run", steps=2)) == 0
    gc.collect()
    assert [each() for each in seen] == [None] * 3


def test_metrics_that_are_read_one_step_late_as_on_an_accelerator_are_the_same(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = {"sample_interval": 5, "check_replicas_every": 3, "profile_steps": [2, 6], "skip_steps": [5, STEPS]}
    seen = []
    for late in (0, 1):
        monkeypatch.setitem(loop_module.LATENESS, "cpu", late)
        run_dir = tmp_path / str(late)
        assert start(config_for(text, run_dir, **due)) == 0
        events = [(event["kind"], event["step"]) for event in read_events(run_dir / "events.jsonl")]
        seen.append((metrics(run_dir), events, state_bytes(run_dir, STEPS)))
    assert seen[0] == seen[1]


def test_sequences_grow_in_the_middle_of_a_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """28 samples of 16 tokens were read: the next one of 40 is the 12th of the source. A stop in the longer stage is as
    any."""
    read: list[int] = []

    def noted(source: Any, first: int, *args: Any) -> Batch:
        read.append(first)
        return read_batch(source, first, *args)

    read_batch = batches_module.read_batch
    assert start(config_for(text, tmp_path, steps=7, eval_interval=0)) == 0
    monkeypatch.setattr(batches_module, "read_batch", noted)
    longer = config_for(text, tmp_path, seq_length=40, eval_interval=0)
    scaling = {"rope_scaling": "yarn", "rope_scaling_factor": 2.5, "rope_original_positions": 16}
    longer = replace(longer, model=replace(longer.model, **scaling))
    capsys.readouterr()
    for stop in (8, STEPS):
        with monkeypatch.context() as patch:
            stop_after(stop, patch)
            assert start(longer) == 0
        said = capsys.readouterr().out
        assert ("train.seq_length is now 40; the run was at 16" in said) == (stop == 8)
        assert ("samples have 40 tokens from here on; each source goes on: text after " in said) == (stop == 8)
    assert sorted(set(read))[:4] == [28, 30, 32, 34]
    state = json.loads((tmp_path / f"checkpoints/step-{STEPS:08d}/state.json").read_text())
    assert [*state["position"]["sources"].values()] == [[0, 12, 40]]
    assert state["position"]["first"] == 28
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "loss" in record]
    assert [record["tokens"] for record in records] == [
        4 * 16 * min(n, 7) + 4 * 40 * max(n - 7, 0) for n in range(1, 13)
    ]
    lr = longer.lr, longer.optimizer.lr, STEPS
    assert records[-1]["lr"] == learning_rate(STEPS - 1, lr[0], peak=lr[1], steps=lr[2])


def test_weight_decay_falls_to_zero_over_the_steps_of_the_run_however_often_it_is_started(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, step = list[float](), FlatAdamW.step

    def noted(self: FlatAdamW, lr: Tensor, **options: Any) -> None:
        given.append(options["decay_factor"])
        step(self, lr, **options)

    monkeypatch.setattr(FlatAdamW, "step", noted)
    config = config_for(text, tmp_path)
    config.optimizer = replace(config.optimizer, weight_decay_schedule="to_zero")
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        assert start(config) == 0
    assert len(given) < STEPS
    assert start(config) == 0
    assert given == [1 - step / STEPS for step in range(STEPS)]


FP16 = {"precision": "fp16", "optimizer": OptimizerConfig(loss_scale_window=4, initial_loss_scale=2.0**12)}


def test_a_continued_fp16_run_has_the_loss_scale_of_the_uninterrupted_one(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows every four steps, of which some are on either side of the stop."""
    assert not resume_differs(text, tmp_path, monkeypatch, **FP16)
    scales = [r["loss_scale"] for r in read_metrics(tmp_path / "parts" / "metrics.jsonl") if "loss" in r]
    assert scales == [2.0 ** (12 + step // 4) for step in range(STEPS)]


@pytest.mark.parametrize("dropped", ["exp_avg", "exp_avg_sq", "master", "optimizer"])
def test_dropping_one_piece_of_state_is_noticed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropped: str
) -> None:
    """The negative control of every resume test: tensors of one kind are read into nowhere."""
    pieces_of = saving_module.training_pieces

    def incomplete(*args: Any) -> list[Any]:
        return [
            replace(piece, tensor=piece.tensor.clone()) if piece.name.split(".")[0] == dropped else piece
            for piece in pieces_of(*args)
        ]

    monkeypatch.setattr(saving_module, "training_pieces", incomplete)
    assert resume_differs(text, tmp_path, monkeypatch)


def test_a_run_may_go_on_in_another_precision(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 parameters are rounded masters, so a checkpoint of either precision holds what the other needs."""
    config = config_for(text, tmp_path / "run", steps=4)
    for steps, precision in ((4, "bf16"), (8, "fp32"), (STEPS, "bf16")):
        config = replace(config, precision=precision, train=replace(config.train, steps=steps))
        assert start(config) == 0
    assert max(losses(tmp_path / "run")) == STEPS
    assert "precision is now bf16; the run was at fp32" in capsys.readouterr().out


def test_a_start_that_is_refused_late_lets_go_of_the_run_folder(text: Path, tmp_path: Path) -> None:
    config = config_for(text, tmp_path / "run", steps=4)
    assert start(config) == 0
    for manifest in (tmp_path / "run" / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(UserError, match="no checkpoint of this run can be read"):
        start(config)
    assert (tmp_path / "run" / "lock").read_text() == ""


@pytest.mark.parametrize(("asynchronous", "newest"), [(False, 4), (True, 8)])
def test_a_run_that_another_job_has_taken_over_ends(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asynchronous: bool,
    newest: int,
) -> None:
    """At the first save, not after the last step; behind the training at the second, when all ranks know."""
    monkeypatch.setattr(RunFolder, "lost", lambda self: "another job has taken over")
    config = config_for(text, tmp_path / "run")
    config.checkpoint = replace(config.checkpoint, asynchronous=asynchronous)
    assert start(config) == 1
    assert capsys.readouterr().err.count("this job has ended: another job has taken over") == 1
    assert max(losses(tmp_path / "run")) == newest
    assert checkpoints(tmp_path / "run") == []


UNREADABLE = Problem("data.path", "text.txt", "cannot be read on rank 1", "mend it")


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
    save = saving_module.save

    def full_at_step_4(folder: Path, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == 4:
            raise saving_module.CheckpointError("the checkpoint of step 4 was not saved: no space left on device")
        return save(folder, step, *args, **kwargs)

    monkeypatch.setattr(saving_module, "save", full_at_step_4)
    assert start(config_for(text, tmp_path / "run")) == 0
    assert "no space left" in capsys.readouterr().out
    assert checkpoints(tmp_path / "run") == [8, 12]


def test_bf16_trains_with_fp32_masters(text: Path, tmp_path: Path) -> None:
    config = replace(config_for(text, tmp_path / "run", steps=60), precision="bf16")
    assert start(config) == 0
    values = losses(tmp_path / "run")
    assert values[60] < values[1] - 0.5
    assert torch.get_default_dtype() == torch.float32


def test_a_crash_is_recorded_though_the_lock_cannot_be_read(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash() -> None:
        raise ValueError("a bug")

    at_step(2, crash, monkeypatch)
    monkeypatch.setattr(RunFolder, "lost", lambda self: "its lock names nobody")
    with pytest.raises(ValueError, match="a bug"):
        start(config_for(text, tmp_path / "run"))
    assert read_events(tmp_path / "run" / "events.jsonl")[-1]["message"] == "ValueError: a bug"


def test_the_end_is_recorded_when_no_watchdog_waits_for_other_ranks(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trackers may take longer than ranks wait for each other."""
    order: list[str] = []
    add = RunLog.add
    monkeypatch.setattr(RunLog, "add", lambda log, record: (order.append(record.get("kind", "")), add(log, record)))
    monkeypatch.setattr(Watchdog, "stop", lambda self: order.append("watchdog"))
    assert start(config_for(text, tmp_path / "run")) == 0
    assert order.index("watchdog") < order.index("finished")


def run_on(layout: ParallelLayout, config: Config, function: Any, interval: int = 0) -> list[Any]:
    """The outcomes of `function(context, config)` of all ranks."""
    parallel = replace(config.parallel, tp=layout.tp, timeout_s=20)
    config = derive(replace(config, parallel=parallel, checkpoint=replace(config.checkpoint, interval=interval)))
    return run_ranks(function, layout.world_size, config, layout=layout, timeout=40)


LATE = 7  # the seed of a run that reads its figures one step late


def _refusing_step_3(context: ParallelContext, config: Config) -> int | str:
    read = batches_module.local_batches

    def refuse(source: Any, config: Config, samples: range, share: Any, problems: Any = None) -> list[Batch]:
        if problems is not None and samples.start == 2 * config.train.global_batch_size:  # the third step of training
            problems.append(UNREADABLE)
        return read(source, config, samples, share, problems)

    if context.rank == 1:
        batches_module.local_batches = refuse
    if config.seed == LATE:
        loop_module.LATENESS["cpu"] = 1  # as on an accelerator: step 4 is launched before step 3 is read
    return outcome(context, config)


def test_a_batch_that_one_rank_cannot_read_ends_all_with_its_message(text: Path, tmp_path: Path) -> None:
    """Another rank of its model, of its batch, and of neither."""
    for seed in (LATE, LATE + 1):
        config = replace(config_for(text, tmp_path / str(seed)), seed=seed)
        assert run_on(ParallelLayout(tp=2, dp=2), config, _refusing_step_3) == [str(UserError(UNREADABLE))] * 4
        (saved,) = (tmp_path / str(seed) / "checkpoints").glob("step-*")
        assert saved.name == "step-00000002"
        tensors = {name: value for file in saved.glob("*.safetensors") for name, value in load_file(file).items()}
        assert float(tensors["optimizer.step"]) == 2


def _drifting(context: ParallelContext, config: Config) -> int | str:
    take_step = TrainStep.__call__

    def and_drift(self: TrainStep, *args: Any, **kwargs: Any) -> PendingMetrics:
        launched = take_step(self, *args, **kwargs)
        self._training.buffers.masters[0] += 1
        return launched

    if context.rank == 3:
        TrainStep.__call__ = and_drift  # type: ignore[method-assign]
    return outcome(context, config)


def test_a_rank_that_drifts_from_its_replicas_stops_all(text: Path, tmp_path: Path) -> None:
    """Rank 0 shares nothing with rank 3 that differs: it learns of it all the same."""
    config = config_for(text, tmp_path / "run", check_replicas_every=3, eval_interval=0)
    assert run_on(ParallelLayout(tp=2, dp=2), config, _drifting) == [1] * 4
    assert max(losses(tmp_path / "run")) == 3


def test_a_finished_run_uploads_what_its_last_start_could_not(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, store = config_for(text, tmp_path / "run", steps=4, eval_interval=0), tmp_path / "store"
    config = replace(config, checkpoint=replace(config.checkpoint, remote=f"file://{store}"))
    manifest = store / f"checkpoints/step-{4:08d}/manifest.json"
    with monkeypatch.context() as patch:
        patch.setattr(Remote, "put", Mock(side_effect=OSError("no store")))
        patch.setattr("megalite.checkpoint.uploads.PATIENCE_S", 0.3)
        start(config)
    assert not manifest.exists()
    capsys.readouterr()
    assert start(config) == 0
    assert "already finished: step 4 of 4" in capsys.readouterr().out
    assert manifest.read_bytes() == (tmp_path / f"run/checkpoints/step-{4:08d}/manifest.json").read_bytes()

"""Everything that a run needs, built in the order in which mistakes are cheapest to report.

device and process groups -> data -> run folder -> model, buffers, optimizer -> state of the newest checkpoint.
Whatever one rank finds wrong, all ranks refuse together.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.commit import CHECKPOINTS, STATE, committed, dead_links, passed_over
from megalite.checkpoint.run_folder import RunFolder, judge_room
from megalite.checkpoint.store import Found, newest
from megalite.checkpoint.tokenizer_folder import keep_tokenizer
from megalite.config.derive import OPEN, derive_vocabulary
from megalite.config.exchange import exchange_of
from megalite.config.schema import Config, LearningRateConfig
from megalite.config.settings import DERIVED, as_plain, value_of
from megalite.config.step_plan import samples_when_longer
from megalite.config.user_files import as_record
from megalite.data.open import OpenedData, Preparation, open_data
from megalite.errors.problems import Problem, UserError
from megalite.errors.words import several
from megalite.launch.agreement import on_first, together
from megalite.launch.context import ParallelContext
from megalite.launch.device import slow_precision
from megalite.launch.environment import ProcessEnvironment
from megalite.optim.schedule import learning_rate
from megalite.train.build import (
    ReadWeights,
    Training,
    build_training,
    fill_with_imported_values,
    fill_with_start_values,
)
from megalite.train.device_settings import ASYNC_TP, CUDA_GRAPH, derive_device
from megalite.train.history import ENDS, EVENTS, METRICS, read_events, read_metrics
from megalite.train.sample import Prompt, prompts_of
from megalite.train.state import Progress, SavedState, is_rounded, state_bytes, training_pieces


@dataclass
class Job:
    """One run on this rank."""

    config: Config
    context: ParallelContext
    data: OpenedData
    folder: RunFolder
    training: Training
    progress: Progress
    resumed_from: int | None  # step of the checkpoint that the run continues from
    prompts: list[Prompt]  # of the samples of text
    tokenizer_files: dict[str, str] = field(default_factory=dict)  # name -> hash, of its folder
    record: dict[str, Any] = field(default_factory=dict)  # a Seal of each file of the record, of that checkpoint
    evaluated: bool = False  # the records hold the evaluation of the step that the run continues from
    measured: dict[str, Any] = field(default_factory=dict)  # the newest line of a step that this start continues
    over: bool = False  # an earlier start has done and recorded everything: this one leaves its folder as it is

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after `step`."""
        interval, last = self.config.train.eval_interval, self.config.train.steps
        return self.data.validation is not None and interval > 0 and (step % interval == 0 or step == last)


def open_training_data(
    config: Config,
    context: ParallelContext,
    environment: ProcessEnvironment,
    preparation: Preparation,
    progress: Callable[..., None],
) -> OpenedData:
    """Prepared by the first rank of every node (under a lock: once on a shared disk), then opened by all."""
    first_of_node = not environment.local_rank  # unknown: everybody asks, the lock lets one of them work
    made = together(context, lambda: preparation.prepare(config, progress) if first_of_node else None, patient=True)
    # The others find it made; of text that has changed meanwhile they make their own, and are refused below.
    data = together(context, lambda: open_data(config, made or preparation.prepare(config)), patient=True)
    others = {fingerprint: rank for rank, [fingerprint] in enumerate(context.gather_json([data.fingerprint]))}
    if len(others) > 1:  # the same on every rank, so that all refuse
        rule = f"ranks {' and '.join(map(str, sorted(others.values())))} find different data at this place"
        raise UserError(Problem("data.path", config.data.path, rule, "give every node the same files"))
    return data


def build_job(
    config: Config,
    context: ParallelContext,
    environment: ProcessEnvironment,
    data: OpenedData,
    read_weights: ReadWeights,
    report: Callable[[str], None],
) -> Job:
    """The run folder, the model and its training state: new, imported, or of the newest checkpoint."""
    config = derive_device(derive_vocabulary(config, data.vocab_size), context, environment, report)
    assert config.run_dir is not None, "derive() fills it in"
    path, weights = Path(config.run_dir), config.checkpoint.init_from
    prompts = together(context, lambda: prompts_of(config, data))
    begun = on_first(context, lambda: has_checkpoints(path))
    if weights is not None and not begun:  # else nobody reads them
        together(context, lambda: read_weights(weights, config.model, None))  # checked at once, read later
    folder = RunFolder(path, context, config.resume, as_plain(config), data.fingerprint)
    try:
        for line in (*config.told, *folder.changes):
            report(line)
        if slow := slow_precision(context.dtype, context.device):
            report(slow)
        if config.train.fp8 is not None and context.device.type == "cpu":
            report("a CPU imitates fp8: numbers are rounded as on a GPU, and steps take longer than without train.fp8")
        for name in (ASYNC_TP, CUDA_GRAPH):
            if value_of(config, name) and name in config.derived:
                report(f"on, as this device allows it: {name} ({name}=false: off)")
        if config.parallel.cp > 1:
            exchange = exchange_of(config)
            report(f"the {config.parallel.cp} ranks of a sequence exchange keys by {exchange.name}: {exchange.why}")
        job = Job(config, context, data, folder, build_training(config, context), Progress(), None, prompts)
        found = newest(folder.checkpoints, context, report)
        if found is not None:
            _restore(job, found, report)
        elif weights is not None:
            buffers = job.training.buffers
            together(context, lambda: fill_with_imported_values(buffers, read_weights, config, context))
        else:
            fill_with_start_values(job.training.buffers, config, context)
        job.evaluated, job.over, job.measured = on_first(context, lambda: _recorded(job))
        if not job.over:
            if warning := on_first(context, lambda: _judge_room(job)):
                report(warning)
            derived = [name for name in config.derived if value_of(config, name) not in OPEN]
            folder.begin(context, as_plain(config) | {DERIVED: derived})
        if data.tokenizer is not None:  # mended even if the run is over
            tokenizer, known = data.tokenizer, job.tokenizer_files
            job.tokenizer_files = on_first(context, lambda: keep_tokenizer(path, tokenizer.files(), known))
    except BaseException:
        folder.withdraw()  # nobody else will: the job does not exist
        raise
    return job


def has_checkpoints(run_dir: Path) -> bool:
    """Whether there is something to continue from. A run that has saved goes on or not at all: a new start would write
    over its records."""
    folder = run_dir / CHECKPOINTS
    if dead := dead_links(folder):
        rule = f"it is a link to {os.readlink(folder / dead[-1])}, and nothing is there"
        remedy = "mount its disk, or delete the link to go on from the checkpoint before"
        raise UserError(Problem("run_dir", str(folder / dead[-1]), rule, remedy))
    if committed(folder):
        return True
    events, gone = read_events(run_dir / EVENTS), ""
    if saved := [event["step"] for event in events if event["kind"] in ("checkpoint", "resume")]:
        gone = f"{EVENTS} tells of a checkpoint of step {saved[-1]:,}"
    elif not events and read_metrics(run_dir / METRICS):
        gone = f"{METRICS} tells of steps, and {EVENTS} does not say that none was saved"
    if gone:
        rule = "; ".join([f"its {gone}, but there is no checkpoint in {folder}", *passed_over(folder)])
        remedy = "put the checkpoints back (is their disk mounted?)"
        start_anew = f"to start from step 1 on purpose, set another run_dir or delete {run_dir}"
        raise UserError(Problem("run_dir", str(run_dir), rule, f"{remedy}; {start_anew}"))
    return False


def _restore(job: Job, found: Found, report: Callable[[str], None]) -> None:
    """The state of a checkpoint, whatever layout wrote it; collective."""
    if (origin := found.manifest.about.get("run_id", job.folder.run_id)) != job.folder.run_id:
        rule = f"it is of run {origin}, and the folder is that of run {job.folder.run_id}"
        remedy = "take it out of this folder; to continue its run, copy the whole run folder and set run_dir to it"
        raise UserError(Problem(str(found.path), "of another run", rule, remedy))
    state, training = SavedState.of(found), job.training
    found.read_into(training_pieces(training), unread=is_rounded)
    training.spread_masters()
    if training.loss_scale is not None and state.loss_scale is not None:  # not if it was no fp16 run
        training.loss_scale.state.copy_(torch.tensor(state.loss_scale))
    job.progress, job.tokenizer_files, job.resumed_from = state.progress, state.tokenizer, found.step
    job.record = state.record
    before, train, step = state.config, job.config.train, found.step
    if (length := before["train"]["seq_length"]) != train.seq_length:
        consumed = job.progress.samples
        job.progress.samples = samples_when_longer(consumed, length, train.seq_length)
        over = job.progress.samples * train.seq_length - consumed * length
        passed_over = f"; {over:,} are passed over, to begin with a whole sample" if over else ""
        report(f"the data goes on behind the first {consumed * length:,} tokens of its order{passed_over}")
    schedule = as_record(LearningRateConfig, before["lr"], found.path / STATE)
    old = learning_rate(step, schedule, peak=before["optimizer"]["lr"], steps=before["train"]["steps"])
    new = learning_rate(step, job.config.lr, peak=job.config.optimizer.lr, steps=train.steps)
    if not math.isclose(old, new, rel_tol=1e-6):
        rises = "; it rises: optimizer.lr, lr.schedule and lr.warmup_steps say how it goes on" if new > old else ""
        was = f"in a run of {several(before['train']['steps'], 'step')} it was {old:.3g}"
        report(f"the learning rate of step {step + 1} of {train.steps} is {new:.3g}, {was}{rises}")


def _recorded(job: Job) -> tuple[bool, bool, dict[str, Any]]:
    """Whether the records hold the evaluation of the step that the run continues from, whether this start has nothing
    to do and nothing to record, and the newest line of a step."""
    step, folder = job.progress.step, job.folder.path
    if job.resumed_from is None:
        return False, False, {}
    records, events = read_metrics(folder / METRICS), read_events(folder / EVENTS)
    evaluated = any(record["step"] == step and "val_loss" in record for record in records)
    done = step >= job.config.train.steps and (evaluated or not job.evaluates(step))
    known = [record for record in records if "loss" in record and record["step"] <= step]
    return evaluated, done and bool(events) and events[-1]["kind"] in ENDS, known[-1] if known else {}


def _judge_room(job: Job) -> str:
    checkpoint, step, steps = job.config.checkpoint, job.progress.step, job.config.train.steps
    interval = checkpoint.interval or steps  # and one of the last step
    saves = max(0, -(-steps // interval) - step // interval) if step < steps else 0
    return judge_room(job.folder.checkpoints, state_bytes(job.config), keep=checkpoint.keep, saves=saves)


def checkpoint_state(job: Job) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    return {
        "progress": dict(vars(job.progress)),
        "loss_scale": None if job.training.loss_scale is None else job.training.loss_scale.state.tolist(),
        "data": {"fingerprint": job.data.fingerprint, "description": job.data.description},
        "layout": {axis: getattr(job.context.layout, axis) for axis in ("tp", "cp", "pp", "vpp", "dp", "world_size")},
        "tokenizer": job.tokenizer_files,
        "config": as_plain(job.config),
        "torch": torch.__version__,
    }

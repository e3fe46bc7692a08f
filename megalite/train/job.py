"""Everything that a run needs, built in the order in which mistakes are cheapest to report.

device and process groups -> data -> run folder -> model, buffers, optimizer -> state of the newest checkpoint.
Whatever one rank finds wrong, all ranks refuse together.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from megalite.checkpoint.commit import committed
from megalite.checkpoint.manifest import STATE
from megalite.checkpoint.room import judge_room
from megalite.checkpoint.run_folder import CHECKPOINTS, RunFolder
from megalite.checkpoint.store import Found, newest
from megalite.checkpoint.tokenizer_folder import keep_tokenizer
from megalite.config.derive import OPEN, derive_vocabulary
from megalite.config.inherited import DERIVED
from megalite.config.schema import Config, LearningRateConfig
from megalite.config.settings import as_plain, value_of
from megalite.config.user_files import as_record
from megalite.data.open import OpenedData, Preparation, open_data
from megalite.errors.problems import Problem, UserError
from megalite.launch.context import ParallelContext
from megalite.launch.device import DTYPES
from megalite.launch.environment import ProcessEnvironment
from megalite.optim.schedule import learning_rate
from megalite.train.history import (
    EVENTS,
    METRICS,
    end_is_recorded,
    is_evaluated,
    last_checkpoint,
    read_events,
    read_metrics,
)
from megalite.train.sample import Prompt, prompts_of
from megalite.train.state import Progress, SavedState, is_rounded, state_bytes, training_pieces
from megalite.train.training import (
    ReadWeights,
    Training,
    build_training,
    fill_with_imported_values,
    fill_with_start_values,
)

T = TypeVar("T")


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
    evaluated: bool = False  # the records hold the evaluation of the step that the run continues from
    over: bool = False  # an earlier start has done and recorded everything: this one leaves its folder as it is

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after `step`."""
        interval, last = self.config.train.eval_interval, self.config.train.steps
        return self.data.validation is not None and interval > 0 and (step % interval == 0 or step == last)


def agreed(context: ParallelContext, action: Callable[[], T], *, patient: bool = False) -> T:
    """The result of `action`, or one UserError on all ranks with the problems of all ranks.

    `patient`: the action may take a rank longer than parallel.timeout_s allows for a collective.
    """
    problems: list[Problem] = []
    result: T | None = None
    try:
        result = action()
    except UserError as error:
        problems = error.problems
    if patient:
        context.barrier(patient=True)
    context.agree(problems)
    return result  # type: ignore[return-value]  # agree() raises where an action failed


def open_training_data(
    config: Config,
    context: ParallelContext,
    environment: ProcessEnvironment,
    preparation: Preparation,
    progress: Callable[..., None],
) -> OpenedData:
    """Prepared by the first rank of every node (under a lock: once on a shared disk), then opened by all."""
    first_of_node = not environment.local_rank  # unknown: everybody asks, the lock lets one of them work
    agreed(context, lambda: preparation.prepare(config, progress) if first_of_node else None, patient=True)
    data = agreed(context, lambda: open_data(config, preparation.find(config)))
    others = {fingerprint: rank for rank, [fingerprint] in enumerate(context.gather_json([data.fingerprint]))}
    if len(others) > 1:  # the same on every rank, so that all refuse
        rule = f"ranks {' and '.join(map(str, sorted(others.values())))} find different data at this place"
        raise UserError(Problem("data.path", config.data.path, rule, "give every node the same files"))
    return data


def derive_device(config: Config, context: ParallelContext) -> Config:
    """Settings that follow from the device: compiling pays on CUDA, on a CPU it costs more than it brings."""
    compiled = context.device.type == "cuda" if config.train.compile is None else config.train.compile
    precision = next(name for name, dtype in DTYPES.items() if dtype == context.dtype)
    return replace(config, precision=precision, train=replace(config.train, compile=compiled))


def build_job(
    config: Config,
    context: ParallelContext,
    data: OpenedData,
    read_weights: ReadWeights,
    report: Callable[[str], None],
) -> Job:
    """The run folder, the model and its training state: new, imported, or of the newest checkpoint."""
    config = derive_device(derive_vocabulary(config, data.vocab_size), context)
    assert config.run_dir is not None, "derive() fills it in"
    prompts = agreed(context, lambda: prompts_of(config, data))
    weights = config.checkpoint.init_from
    agreed(context, lambda: refuse_lost_checkpoints(Path(config.run_dir or "")) if context.rank == 0 else None)
    begun = context.broadcast_object(bool(committed(Path(config.run_dir) / CHECKPOINTS)))
    if weights is not None and not begun:  # else nobody reads them
        agreed(context, lambda: read_weights(weights, config.model, None))  # checked at once, read later
    folder = RunFolder.open(Path(config.run_dir), context, config.resume, as_plain(config), data.fingerprint)
    try:
        if config.inherited:
            report(f"as before: {', '.join(config.inherited)}")
        for change in folder.changes:
            report(change)
        job = Job(config, context, data, folder, build_training(config, context), Progress(), None, prompts)
        _set_state(job, read_weights, report)
        job.evaluated, job.over = context.broadcast_object(agreed(context, lambda: _known_of(job)))
        if not job.over:
            if warning := agreed(context, lambda: _judge_room(job)):
                report(warning)
            derived = [name for name in config.derived if value_of(config, name) not in OPEN]
            folder.begin(context, as_plain(config) | {DERIVED: derived})
        if data.tokenizer is not None:  # mended even if the run is over
            tokenizer, known = data.tokenizer, job.tokenizer_files
            kept = agreed(
                context, lambda: keep_tokenizer(folder.path, tokenizer.files(), known) if context.rank == 0 else {}
            )
            job.tokenizer_files = context.broadcast_object(kept)
    except BaseException:
        folder.withdraw()  # nobody else will: the job does not exist
        raise
    return job


def _known_of(job: Job) -> tuple[bool, bool]:
    """On rank 0: whether the records hold the evaluation of the step that the run continues from, and whether this
    start has nothing to do and nothing to record."""
    step, folder = job.progress.step, job.folder.path
    if job.context.rank > 0 or job.resumed_from is None:
        return False, False
    evaluated = is_evaluated(read_metrics(folder / METRICS), step)
    done = step >= job.config.train.steps and (evaluated or not job.evaluates(step))
    return evaluated, done and end_is_recorded(read_events(folder / EVENTS))


def refuse_lost_checkpoints(run_dir: Path) -> None:
    """A run that has saved goes on or not at all: to begin again would be to write over its records."""
    step = last_checkpoint(read_events(run_dir / EVENTS))
    gone = f"{EVENTS} tells of a checkpoint of step {step:,}" if step is not None else None
    if step is None and not any(read_events(run_dir / EVENTS)) and read_metrics(run_dir / METRICS):
        gone = f"{METRICS} tells of steps, and {EVENTS} does not say that none was saved"
    if gone and not committed(run_dir / CHECKPOINTS):
        rule = f"its {gone}, but there is no checkpoint in {run_dir / CHECKPOINTS}"
        remedy = "put the checkpoints back (is their disk mounted? A link in place of a step- folder is not followed)"
        start_anew = f"to start from step 1 on purpose, set another run_dir or delete {run_dir}"
        raise UserError(Problem("run_dir", str(run_dir), rule, f"{remedy}; {start_anew}"))


def _judge_room(job: Job) -> str:
    if job.context.rank > 0:
        return ""
    checkpoint, step, steps = job.config.checkpoint, job.progress.step, job.config.train.steps
    saves = steps // checkpoint.interval - step // checkpoint.interval if checkpoint.interval else 0
    saves += step < steps and (not checkpoint.interval or steps % checkpoint.interval > 0)  # that of the last step
    return judge_room(job.folder.checkpoints, state_bytes(job.config), keep=checkpoint.keep, saves=max(0, saves))


def _set_state(job: Job, read_weights: ReadWeights, report: Callable[[str], None]) -> None:
    found = newest(job.folder.checkpoints, job.context, report)
    training = job.training
    if found is not None:
        job.folder.refuse_another_s(found.path, found.manifest.about)
        state = SavedState.of(found)
        found.read_into(training_pieces(training), unread=is_rounded)
        training.spread_masters()
        if training.loss_scale is not None and state.loss_scale is not None:  # not if it was no fp16 run
            training.loss_scale.state.copy_(torch.tensor(state.loss_scale))
        job.progress, job.tokenizer_files = state.progress, state.tokenizer
        job.resumed_from = found.step
        if note := _another_rate(found, job.config):
            report(note)
    elif job.config.checkpoint.init_from is not None:
        agreed(job.context, lambda: fill_with_imported_values(training.buffers, read_weights, job.config, job.context))
    else:
        fill_with_start_values(training.buffers, job.config, job.context)


def _another_rate(found: Found, config: Config) -> str:
    """What the next step's learning rate is, and would have been, where settings have changed it."""
    before, step = found.state["config"], found.step
    schedule = as_record(LearningRateConfig, before["lr"], found.path / STATE)
    steps, peak = before["train"]["steps"], before["optimizer"]["lr"]
    old = learning_rate(step, schedule, peak=peak, steps=steps)
    new = learning_rate(step, config.lr, peak=config.optimizer.lr, steps=config.train.steps)
    if math.isclose(old, new, rel_tol=1e-6):
        return ""
    rises = "; it rises: optimizer.lr, lr.schedule and lr.warmup_steps say how it goes on" if new > old else ""
    was = f"it was {old:.3g} at the end of {steps} steps" if step >= steps else f"of {steps} steps it had {old:.3g}"
    return f"the learning rate of step {step + 1} of {config.train.steps} is {new:.3g}, {was}{rises}"


def checkpoint_state(job: Job) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    config = job.config
    return {
        "progress": job.progress.as_state(),
        "loss_scale": None if job.training.loss_scale is None else job.training.loss_scale.state.tolist(),
        "data": {"fingerprint": job.data.fingerprint, "description": job.data.description},
        "layout": {axis: getattr(job.context.layout, axis) for axis in ("tp", "pp", "vpp", "dp", "world_size")},
        "tokenizer": job.tokenizer_files,
        "config": as_plain(config),
        "torch": torch.__version__,
    }

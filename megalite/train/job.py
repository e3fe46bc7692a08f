"""Everything that a run needs, built in the order in which mistakes are cheapest to report.

device and process groups -> data -> run folder -> model, buffers, optimizer -> state of the newest checkpoint.
Whatever one rank finds wrong, all ranks refuse together.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from megalite.checkpoint.commit import committed
from megalite.checkpoint.room import judge_room
from megalite.checkpoint.run_folder import CHECKPOINTS, RunFolder
from megalite.checkpoint.store import newest
from megalite.config.derive import derive_vocabulary
from megalite.config.problems import Problem, UserError
from megalite.config.schema import Config
from megalite.config.settings import as_plain
from megalite.data.open import OpenedData, open_data
from megalite.data.prepare import examine, prepare, targets_of
from megalite.hf.import_model import import_model
from megalite.parallel.context import ParallelContext
from megalite.parallel.device import DTYPES
from megalite.parallel.environment import ProcessEnvironment
from megalite.train.sample import Prompt, prompts_of
from megalite.train.state import ROUNDED, Progress, state_bytes, training_pieces
from megalite.train.training import Training, build_training, fill_with_start_values

T = TypeVar("T")
TOKENIZER = "tokenizer"  # folder of a run: what its token ids mean, as transformers reads it


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


def find_text(config: Config) -> None:
    """Refuse text or a tokenizer that is not there or not readable; quick, and nothing is written."""
    if config.data.source != "tokens":
        choice, targets = targets_of(config)
        examine(choice, [target.source for target in targets])


def open_training_data(
    config: Config, context: ParallelContext, environment: ProcessEnvironment, progress: Callable[..., None]
) -> OpenedData:
    """Prepared by the first rank of every node (under a lock: once on a shared disk), then opened by all."""
    first_of_node = not environment.local_rank  # unknown: everybody asks, the lock lets one of them work
    agreed(context, lambda: prepare(config, progress) if first_of_node else None, patient=True)
    data = agreed(context, lambda: open_data(config))
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


def build_job(config: Config, context: ParallelContext, data: OpenedData, report: Callable[[str], None]) -> Job:
    """The run folder, the model and its training state: new, imported, or of the newest checkpoint."""
    config = derive_device(derive_vocabulary(config, data.vocab_size), context)
    assert config.run_dir is not None, "derive() fills it in"
    prompts = agreed(context, lambda: prompts_of(config, data))
    weights = config.checkpoint.init_from
    begun = context.broadcast_object(bool(committed(Path(config.run_dir) / CHECKPOINTS)))
    if weights is not None and not begun:  # else nobody reads them
        agreed(context, lambda: import_model(weights, config.model))  # checked at once, read later
    folder = RunFolder.open(Path(config.run_dir), context, config.resume, as_plain(config), data.fingerprint)
    try:
        for change in folder.changes:
            report(change)
        job = Job(config, context, data, folder, build_training(config, context), Progress(), None, prompts)
        _set_state(job, report)
        if warning := agreed(context, lambda: _judge_room(job)):
            report(warning)
        folder.begin(context, as_plain(config))
        if context.rank == 0 and data.tokenizer is not None and not (folder.path / TOKENIZER).exists():
            data.tokenizer.save(folder.path / TOKENIZER)
    except BaseException:
        folder.withdraw()  # nobody else will: the job does not exist
        raise
    return job


def _judge_room(job: Job) -> str:
    if job.context.rank > 0:
        return ""
    checkpoint, step, steps = job.config.checkpoint, job.progress.step, job.config.train.steps
    saves = steps // checkpoint.interval - step // checkpoint.interval if checkpoint.interval else 0
    saves += step < steps and (not checkpoint.interval or steps % checkpoint.interval > 0)  # that of the last step
    return judge_room(job.folder.checkpoints, state_bytes(job.config), keep=checkpoint.keep, saves=max(0, saves))


def _set_state(job: Job, report: Callable[[str], None]) -> None:
    found = newest(job.folder.checkpoints, job.context, report)
    training = job.training
    if found is not None:
        job.folder.refuse_another_s(found.path, found.manifest.about)
        found.read_into(training_pieces(training), unread=ROUNDED)
        training.spread_masters()
        if training.loss_scale is not None and found.state.get("loss_scale") is not None:  # not if it was no fp16 run
            training.loss_scale.state.copy_(torch.tensor(found.state["loss_scale"]))
        job.progress = Progress.from_state(found.state["progress"])
        job.resumed_from = found.step
    elif job.config.checkpoint.init_from is not None:
        folder = Path(job.config.checkpoint.init_from)
        agreed(job.context, lambda: training.buffers.fill(import_model(folder, job.config.model)))  # one by one
    else:
        fill_with_start_values(training.buffers, job.config, job.context)


def checkpoint_state(job: Job) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    config = job.config
    return {
        "progress": job.progress.as_state(),
        "loss_scale": None if job.training.loss_scale is None else job.training.loss_scale.state.tolist(),
        "data": {"fingerprint": job.data.fingerprint, "description": job.data.description},
        "layout": {axis: getattr(job.context.layout, axis) for axis in ("tp", "pp", "vpp", "dp", "world_size")},
        "config": as_plain(config),
        "torch": torch.__version__,
    }

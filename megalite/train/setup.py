"""A run on this rank, and how it is set up: in the order in which mistakes are cheapest to report.

process groups (run.py) -> data -> settings that follow from both -> run folder -> model, buffers, optimizer -> state of
the newest checkpoint. What one rank finds wrong, all ranks refuse together.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.reading import Found, newest
from megalite.checkpoint.run_folder import RunFolder, keep_tokenizer, require_room
from megalite.config.layout import exchange_of
from megalite.config.schema import Config
from megalite.config.settings import DERIVED, OPEN, as_plain, value_of, with_values
from megalite.data.open import OpenedData, TokenFiles, open_data
from megalite.errors.problems import Problem, UserError
from megalite.launch.context import ParallelContext, all_ranks_or_raise, rank0_broadcast
from megalite.launch.device import slow_precision
from megalite.launch.environment import ProcessEnvironment
from megalite.launch.signals import StopSignals
from megalite.launch.watchdog import SAVES, Doing
from megalite.train.build import (
    ReadWeights,
    Training,
    build_training,
    derive_device,
    fill_with_imported_values,
    fill_with_start_values,
)
from megalite.train.evaluate import prompts_of
from megalite.train.history import ENDS, EVENTS, METRICS, RunLog, read_events, read_metrics
from megalite.train.saving import ROUNDED, Progress, SavedState, state_bytes, training_pieces


@dataclass
class Job:
    """One run on this rank: all that it consists of, and where it stands. The loop (loop.py) moves it on."""

    config: Config
    context: ParallelContext
    data: OpenedData
    folder: RunFolder
    training: Training
    prompts: dict[str, list[int]]  # of the samples of text, and their tokens
    hosts: list[str]  # where each rank runs
    log: RunLog
    progress: Progress = field(default_factory=Progress)

    # From the checkpoint that the run continues from, and from the records beside it.
    resumed_from: int | None = None  # step of the checkpoint
    tokenizer_files: dict[str, str] = field(default_factory=dict)  # name -> hash
    seals: dict[str, Any] = field(default_factory=dict)  # of the files of the record
    measured: dict[str, Any] = field(default_factory=dict)  # the newest line of a step
    finished: bool = False  # an earlier start has done and recorded everything: this one leaves the folder as it is

    # Where this start stands.
    stop: StopSignals = field(default_factory=StopSignals)
    stopping: bool = False  # all ranks know that one of them was asked to stop
    problems: list[Problem] = field(default_factory=list)  # of the input that this rank has read: no step is applied
    under_way: bool = False  # the first step is done: from now on no rank is late for a good reason
    saving: bool = False  # training waits for a save
    begun_step: int = 0
    evaluated_step: int = -1  # the newest one

    def go_on(self) -> bool:
        """Whether no rank was asked to stop; collective, one small all-reduce on the host."""
        self.stopping = self.stopping or any(self.context.gather_json([True] if self.stop.requested else []))
        return not self.stopping

    @property
    def evaluation_interval(self) -> int:
        """Steps between evaluations; 0: there are none."""
        return 0 if self.data.validation is None else self.config.train.eval_interval

    def owes_evaluation(self) -> bool:
        """Whether the evaluation that is due after the newest step has not been done."""
        step, interval = self.progress.step, self.evaluation_interval
        due = interval > 0 and step > 0 and (step % interval == 0 or step == self.config.train.steps)
        return due and self.evaluated_step != step

    @property
    def complete(self) -> bool:
        """Whether nothing of the run remains to be done."""
        return self.progress.step >= self.config.train.steps and not self.owes_evaluation()

    def doing(self) -> Doing:
        """This rank's place in training, for the watchdog."""
        setting = "timeout_s" if self.under_way else "startup_timeout_s"
        limit = (f"parallel.{setting}", getattr(self.config.parallel, setting))
        if self.saving:
            return Doing("save", "in a save", *limit, SAVES)
        part, executor = self.training.clock.part, self.training.executor
        words = f"step {self.begun_step}, {part}, pass {executor.at or 'none yet'}"
        return Doing((self.begun_step, self.evaluated_step, part, executor.performed), words, *limit)


def set_up(
    config: Config, context: ParallelContext, data: OpenedData, read_weights: ReadWeights, log: RunLog, hosts: list[str]
) -> Job:
    """The run on this rank: new, imported, or from the newest checkpoint in its folder."""
    vocabulary = {"model.vocab_size": config.model.vocab_size or data.vocab_size}
    config = derive_device(with_values(config, vocabulary), context)
    path, weights, tokenizer = Path(config.run_dir), config.checkpoint.init_from, data.tokenizer
    prompts = all_ranks_or_raise(context, lambda: prompts_of(config, data))
    folder = RunFolder(path, context, config.resume, as_plain(config), data.fingerprint)
    try:
        for line in (*config.told, *folder.changes, *remarks(config, context)):
            log.note(line)
        training = build_training(config, context)
        job = Job(config, context, data, folder, training, prompts, hosts, log)
        if (found := newest(folder.checkpoints, context, log.note)) is not None:
            restore(job, found)
        elif weights is not None:
            fill = partial(fill_with_imported_values, training.buffers, read_weights, config, context)
            all_ranks_or_raise(context, fill)
        else:
            fill_with_start_values(training.buffers, config, context)
        job.begun_step = job.progress.step
        job.evaluated_step, job.finished, job.measured = rank0_broadcast(context, lambda: examine_records(job))
        if not job.finished:
            if job.progress.step < config.train.steps:
                rank0_broadcast(context, lambda: require_room(folder.checkpoints, state_bytes(config)))
            derived = [name for name in config.derived if value_of(config, name) not in OPEN]
            folder.begin(context, as_plain(config) | {DERIVED: derived})
        if tokenizer is not None:  # mended even if the run is over
            known = job.tokenizer_files
            job.tokenizer_files = rank0_broadcast(context, lambda: keep_tokenizer(path, tokenizer.files(), known))
    except BaseException:
        folder.withdraw()  # nobody else will: the job does not exist
        raise
    return job


def open_training_data(
    config: Config,
    context: ParallelContext,
    environment: ProcessEnvironment,
    prepare: Callable[[Config], TokenFiles],
) -> OpenedData:
    """The data of the run: prepared by the first rank of every node, under a lock, then opened by all."""
    first_of_node = not environment.local_rank  # unknown: all ask, the lock lets one of them work
    made = all_ranks_or_raise(context, lambda: prepare(config) if first_of_node else None, patient=True)
    # Other ranks find the files made; where the text has changed meanwhile they make their own, and are refused below.
    data = all_ranks_or_raise(context, lambda: open_data(config, made or prepare(config)), patient=True)
    others = {fingerprint: rank for rank, [fingerprint] in enumerate(context.gather_json([data.fingerprint]))}
    if len(others) > 1:  # the same on every rank, so that all refuse
        rule = f"ranks {' and '.join(map(str, sorted(others.values())))} find different data at this place"
        raise UserError(Problem("data.path", config.data.path, rule, "give every node the same files"))
    return data


def remarks(config: Config, context: ParallelContext) -> Iterator[str]:
    """Lines about settings on this device that the user should know."""
    if words := slow_precision(context.dtype, context.device):
        yield words
    if config.train.fp8 is not None and context.device.type == "cpu":
        yield "a CPU imitates fp8: it rounds as a GPU does, and steps take longer than without train.fp8"
    if config.parallel.cp > 1:
        exchange = exchange_of(config)
        yield f"the {config.parallel.cp} ranks of a sequence exchange keys by {exchange.name}: {exchange.why}"


def restore(job: Job, found: Found) -> None:
    """The state of a checkpoint, whatever layout wrote it; collective."""
    if (origin := found.manifest.about.get("run_id", job.folder.run_id)) != job.folder.run_id:
        rule = f"it is of run {origin}, and the folder is that of run {job.folder.run_id}"
        remedy = "take it out of this folder; to continue its run, copy the whole run folder and set run_dir to it"
        raise UserError(Problem(str(found.path), "of another run", rule, remedy))
    state, training, train = SavedState.of(found), job.training, job.config.train
    found.read_into(training_pieces(training), unread=lambda name: name.startswith(f"{ROUNDED}."))
    training.cast_and_gather_params()
    if training.loss_scale is not None and state.loss_scale is not None:  # not if it was no fp16 run
        training.loss_scale.state.copy_(torch.tensor(state.loss_scale))
    job.resumed_from, job.progress, job.tokenizer_files = found.step, state.progress, state.tokenizer
    job.seals = state.record
    length, consumed = state.config["train"]["seq_length"], state.progress.samples
    if length != train.seq_length:
        job.progress.samples = -(-consumed * length // train.seq_length)  # rounded up, so that no token comes twice
        over = job.progress.samples * train.seq_length - consumed * length
        words = f"{consumed * length:,} tokens of its order; {over:,} are passed over"
        job.log.note(f"the data goes on behind the first {words}")


def examine_records(job: Job) -> tuple[int, bool, dict[str, Any]]:
    """The step that the run continues from if the records hold its evaluation, else -1; whether this start has nothing
    to do and nothing to record; the newest line of a step. UserError where the run has saved and its checkpoints are
    gone: a new start would write over its records."""
    step, folder = job.progress.step, job.folder.path
    lines, events = read_metrics(folder / METRICS), read_events(folder / EVENTS)
    if job.resumed_from is None:
        saved = [event["step"] for event in events if event["kind"] in ("checkpoint", "resume")]
        if saved or (lines and not events):
            words = f"{EVENTS} tells of a checkpoint of step {saved[-1]}" if saved else f"{METRICS} tells of steps"
            rule = f"its {words}, but there is no folder called step- and eight digits in {job.folder.checkpoints}"
            remedy = f"put the checkpoints back (is their disk mounted?), set another run_dir, or delete {folder}"
            raise UserError(Problem("run_dir", str(folder), rule, remedy))
        return -1, False, {}
    job.evaluated_step = step if any(line["step"] == step and "val_loss" in line for line in lines) else -1
    finished = job.complete and bool(events) and events[-1]["kind"] in ENDS
    measured = [line for line in lines if "loss" in line and line["step"] <= step]
    return job.evaluated_step, finished, measured[-1] if measured else {}

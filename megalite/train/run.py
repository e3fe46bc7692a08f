"""One run on this rank, from its settings to its exit status.

It is set up in the order in which mistakes are cheapest to report: process groups -> data -> settings that follow from
both -> run folder -> model, buffers, optimizer -> state of the newest checkpoint -> records. What one rank finds wrong,
all ranks refuse together. Then it trains (loop.py), and records how it ended.
"""

import gc
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megalite.checkpoint.branch import branch_off
from megalite.checkpoint.commit import CHECKPOINTS, committed
from megalite.checkpoint.reading import newest
from megalite.checkpoint.remote import open_remote
from megalite.checkpoint.run_folder import TOKENIZER, RunFolder, keep_tokenizer, require_room
from megalite.checkpoint.uploads import Uploads
from megalite.config.branch import place_of
from megalite.config.derive import BUILT_IN_TOKENIZERS, derive_lengths
from megalite.config.files import private_files
from megalite.config.layout import exchange_of
from megalite.config.phases import PEAK, RunPhase, phase_at, phases_of
from megalite.config.schema import Config
from megalite.config.settings import as_plain, leaves, nested, with_values
from megalite.config.step_plan import FOLLOW_LENGTH, horizon_of
from megalite.data.open import OpenedData, TokenFiles, note_changed_files, open_data
from megalite.errors.problems import Problem, UserError, collect, several, to_stderr
from megalite.launch.context import ParallelContext, all_ranks_or_raise, rank0_broadcast
from megalite.launch.device import slow_precision
from megalite.launch.process import ProcessEnvironment, StopSignals, end_compile_workers, stop_request
from megalite.launch.watchdog import Watchdog, find_cause, is_broken_link
from megalite.model.scaling import lines_of_scaling
from megalite.optim.groups import lines_of_groups
from megalite.train.build import (
    MICRO,
    Fit,
    ReadWeights,
    build_training,
    derive_device,
    fill_with_start_values,
    open_context,
)
from megalite.train.evaluate import prompts_of
from megalite.train.history import Note, RunLog, StatusFile, View, examine_records
from megalite.train.loop import Job, record_settings, train_phase
from megalite.train.owners import write_memory
from megalite.train.phases import begin
from megalite.train.saving import Progress, Saver, TrainingStoppedError, restore, state_bytes

NEWS_S = 1.0  # the signal that ended another rank's start reaches this rank too, which then reports no error


class Companions(NamedTuple):
    """Functions of other packages that training is handed, so that it imports none of them."""

    examine: Callable[[Config], object]  # UserError for text or a tokenizer that is not there; quick, writes nothing
    prepare: Callable[[Config], TokenFiles]  # makes every token file that is not there yet
    read_weights: ReadWeights  # reads the folder of checkpoint.init_from
    fit: Fit  # chooses the micro-batch size by the memory of the GPUs
    with_steps: Callable[[Config, OpenedData, Progress], Config]  # what follows from the run's length, once it is known
    look_at_nodes: Callable[[ParallelContext, Path], Sequence[str]]  # for launch.preflight; lines, on rank 0
    say: Note  # prints a line for the user, on rank 0
    alert: Callable[[Job, str], object]  # tells the user's command of a stall, on any rank
    open_views: Callable[[Job, Note], Mapping[str, View]]  # by name, on rank 0
    about: Callable[[Job], dict[str, Any]]  # fields of the event of a start, on rank 0


def run(config: Config, environment: ProcessEnvironment, companions: Companions) -> int:
    """Train as `config` says, on this rank. Returns the exit status; raises UserError for input that is refused."""
    began, problems = time.monotonic(), list[Problem]()
    context = collect(lambda: open_context(config, environment), problems)
    if context is None:  # the device; one message refuses the data, too
        collect(lambda: companions.examine(config), problems)
        raise UserError(problems)
    run_dir, minutes = Path(config.run_dir), config.train.max_minutes
    status_file = config.launch.status_file if context.rank == 0 else None
    status = StatusFile(status_file, str(run_dir), environment.job_began)
    hosts = [host for (host,) in context.gather_json([socket.gethostname()])]
    job = Job(config, context, hosts, RunLog(companions.say), status)
    failed = False
    try:
        with Watchdog(context, job.doing, run_dir / "logs", hosts, partial(companions.alert, job)) as watchdog:
            if config.launch.preflight:
                for line in companions.look_at_nodes(context, run_dir):
                    job.log.note(f"preflight: {line}")
            job.remote = open_remote(config.checkpoint.remote, context)
            job.opened = open_phases(job, environment, companions.prepare)
            with private_files():
                set_up(job, companions)
                if job.finished:
                    upload_what_is_left(job)
                    return 0
                job.phase, job.saver = "training", Saver(job)
                left_s = None if minutes is None else began + 60 * minutes - time.monotonic()
                with stop_request(left_s, "train.max_minutes") as job.stop:
                    gc.collect()
                    gc.freeze()
                    gc.disable()
                    train(job)
                    watchdog.stop()  # views may take their time, and other ranks have ended
                    return record_end(job)
    except Exception as error:
        failed = not isinstance(error, UserError | TrainingStoppedError)
        with private_files():
            record_failure(error, job)
        if not isinstance(error, TrainingStoppedError):
            raise
        return 1
    finally:
        ended = StopSignals.now is not None and StopSignals.now.ended
        gc.enable()
        gc.unfreeze()  # what the run has left is found by whoever trains again in this process
        end_compile_workers()
        job.log.close()
        if status.state == "running":
            status.write("stopped" if ended else "failed", by="a signal before the first step" if ended else None)
        if job.phase != "start-up":
            job.folder.close()
        context.close(failed=failed or ended)


def open_phases(
    job: Job, environment: ProcessEnvironment, prepare: Callable[[Config], TokenFiles]
) -> list[OpenedData | None]:
    """The data of each phase of the plan that is not over by every checkpoint in the run's folder; phases alike share
    it. Later phases read their text with the tokenizer that the first one was given or has trained."""
    config, context, opened = job.config, job.context, dict[str, OpenedData]()
    run_dir = Path(config.run_dir)
    first = min(rank0_broadcast(context, lambda: [step for step, _ in committed(run_dir / CHECKPOINTS)]), default=0)
    parent, left = place_of(config.checkpoint.branch_from) if config.checkpoint.branch_from else (run_dir, 0)
    tokenizers = [*filter(Path.is_dir, (run_dir / TOKENIZER, parent / TOKENIZER)), None]

    def of_phase(phase: RunPhase) -> OpenedData | None:
        if phase.number < len(job.plan) and (phase.end < first or phase.end <= left):
            return None
        settings, known = phase.config, next((data.tokenizer_folder for data in opened.values()), tokenizers[0])
        if phase.number > 1 and known is not None and settings.tokenizer in BUILT_IN_TOKENIZERS:
            settings = with_values(settings, {"tokenizer": str(known)})
        key = repr((settings.data, settings.train.seq_length, settings.train.eval_interval > 0))
        if key not in opened:
            opened[key] = open_training_data(settings, context, environment, prepare)
        return opened[key]

    job.plan = phases_of(config, context.world_size)
    if len(job.plan) > 1:
        job.config = derive_lengths(config, job.plan[-1].end)
    return [of_phase(phase) for phase in job.plan]


def open_training_data(
    config: Config, context: ParallelContext, environment: ProcessEnvironment, prepare: Callable[[Config], TokenFiles]
) -> OpenedData:
    """The data of the run: prepared by the first rank of every node, under a lock, then opened by all."""
    first_of_node = not environment.local_rank  # unknown: all ask, the lock lets one of them work
    made = all_ranks_or_raise(context, lambda: prepare(config) if first_of_node else None, patient=True)
    # Other ranks find the files made; where the text has changed meanwhile they make their own, and are refused below.
    data = all_ranks_or_raise(context, lambda: open_data(config, made or prepare(config)), patient=True)
    found = context.gather_json([data.fingerprint, data.fingerprint_of_sets])
    others = {tuple(fingerprints): rank for rank, fingerprints in enumerate(found)}
    if len(others) > 1:  # the same on every rank, so that all refuse
        rule = f"ranks {' and '.join(map(str, sorted(others.values())))} find different data at this place"
        raise UserError(Problem("data.path", config.data.path, rule, "give every node the same files"))
    return data


def set_up(job: Job, companions: Companions) -> None:
    """Fill the run on this rank: new, imported, or from the newest checkpoint in its folder, and its records open."""
    context, log = job.context, job.log
    data = next(data for data in job.opened if data is not None)
    vocabulary = {"model.vocab_size": max(data.train.vocab_size for data in job.opened if data is not None)}
    job.base, *of_phases = (
        derive_device(with_values(one, vocabulary), context, companions.fit)
        for one in (job.config, *(phase.config for phase in job.plan))
    )
    job.plan = [replace(phase, config=one) for phase, one in zip(job.plan, of_phases, strict=True)]
    job.data = data
    know_length(job, companions)
    job.prompts = all_ranks_or_raise(context, lambda: prompts_of(job.base, data))
    begun_with = job.opened[0].fingerprint if job.opened[0] else ""
    config, asked = job.base, partial(asked_at, job.plan)
    folder = RunFolder(Path(config.run_dir), context, config.resume, asked, begun_with, job.remote)
    job.folder = folder
    try:
        if place := config.checkpoint.branch_from:
            run, step = place_of(place)
            rank0_broadcast(context, lambda: branch_off(folder, place, run, step, asked(step)))
        found = newest(folder.checkpoints, context, log.note, remote=job.remote)
        phase = phase_at(job.plan, found.manifest.step if found else 0)
        job.config, job.data = phase.config, job.opened[phase.number - 1] or data
        config = job.config
        notes = [*config.told, *folder.changes, slow_precision(context.dtype, context.device)]
        notes += [*lines_of_scaling(config.model), *lines_of_groups(config)]
        if config.train.fp8 is not None and context.device.type == "cpu":
            notes.append("a CPU imitates fp8: it rounds as a GPU does, and steps take longer than without train.fp8")
        if config.parallel.cp > 1:
            notes.append(f"the ranks of a sequence exchange keys by {exchange_of(config).name}")
        for line in filter(None, notes):
            log.note(line)
        rates = {PEAK: job.plan[0].config.optimizer.lr}  # others are by their ratio to it, whichever phase has begun
        job.training = build_training(with_values(config, rates), context, log.note)
        if found is not None:
            restore(job, found)
            know_length(job, companions)
        else:
            read = companions.read_weights
            all_ranks_or_raise(context, lambda: fill_with_start_values(job.training.buffers, config, context, read))
        at = len(job.begun) - 1 if job.begun else 0
        begin(job, job.plan[at if job.opened[at] else at + 1])  # a branch begins behind the run that it leaves
        job.begun_step = job.progress.step
        job.evaluated_step, job.finished, job.measured = rank0_broadcast(context, lambda: examine_records(job))
        if not job.finished:
            if job.progress.step < job.base.train.steps:
                size = state_bytes(job.training, context)
                rank0_broadcast(context, lambda: require_room(folder.checkpoints, size))
            record_settings(job)
        if (tokenizer := data.tokenizer) is not None:  # mended even if the run is over
            known, path = job.tokenizer_files, folder.path
            job.tokenizer_files = rank0_broadcast(context, lambda: keep_tokenizer(path, tokenizer.files(), known))
        open_record(job, companions)
    except BaseException:
        folder.withdraw()
        raise


def know_length(job: Job, companions: Companions) -> None:
    """The steps of a run whose length follows from model and data, as far as it has come; collective."""
    if len(job.plan) == 1:
        known = partial(companions.with_steps, job.base, job.data, job.progress)
        job.base = job.config = all_ranks_or_raise(job.context, known)
        job.plan = phases_of(job.base, job.context.world_size)


def asked_at(plan: Sequence[RunPhase], step: int) -> dict[str, Any]:
    """The settings in which a step is done, without those that follow from the length of the run by its progress."""
    config = phase_at(plan, step).config
    by_length = {*config.derived} & {*FOLLOW_LENGTH} if horizon_of(config.train) != "train.steps" else {}
    return nested({name: value for name, value in leaves(as_plain(config)).items() if name not in by_length})


def open_record(job: Job, companions: Companions) -> None:
    """Open the files that tell of this start; where nothing is left to do, say so."""
    step, context, log, train = job.progress.step, job.context, job.log, job.config.train
    job.status.steps = train.steps
    all_ranks_or_raise(context, lambda: job.status.write("running", step))
    if job.finished:
        job.status.write("finished")
        job.folder.withdraw()
        log.note(f"already finished: step {step} of {train.steps}")
        return
    all_ranks_or_raise(context, lambda: log.open(job, companions.open_views))
    if context.rank == 0:  # the others ask neither git nor the packages for their versions
        files = {part.file.prefix: part.file for data in job.opened if data is not None for part in data.train.parts}
        note_changed_files([*files.values()], job.folder.path, log.note)
        log.event("start" if job.resumed_from is None else "resume", step, **companions.about(job))
        if train.sample_interval > 0 and train.sample_tokens > 0 and not job.prompts:
            log.note("no samples of text: the tokenizer of these tokens is not known")


def train(job: Job) -> None:
    """All remaining steps, or as many as pass until a stop is asked for; the last state is saved."""
    train_phase(job)
    while not job.stopping and len(job.begun) < len(job.plan):
        begin(job, job.plan[len(job.begun)])
        train_phase(job)
    job.saver.save_last()


def upload_what_is_left(job: Job) -> None:
    """Upload the checkpoint of a run that an earlier start has finished, unless it is there."""
    uploads = Uploads(job.remote, job.folder, job.context, job.base.checkpoint.keep)
    uploads.offer(job.progress.step, job.progress.last_applied)
    if left := uploads.end(lambda: False, job.log.note, job.log.event):
        job.log.note(left)


def record_end(job: Job) -> int:
    """Record how training ended, and say what the user must know of it: the exit status."""
    step, words, saved_step = job.progress.step, list[str](), job.saver.saved_step
    by = job.stop.requested or "a signal to another rank" if job.stopping and not job.complete else None
    kind, status = "stopped" if by else "finished", int(saved_step != step)
    job.status.write("failed" if status else kind, by=by)
    left = job.saver.end_uploads(hasty=job.stopping)
    words += [left] if left else []
    job.log.event(kind, step, status=status, **({"by": by} if by else {}), **job.meter.medians())
    if status:
        kept = "there is no checkpoint" if saved_step is None else f"the newest is of step {saved_step}"
        words.append(f"the state of step {step} is not saved; {kept}")
    if count := job.progress.bad_steps_in_a_row:
        bad = f"{several(count, 'bad step')}: {job.fault}, nothing was applied"
        words.append(f"the run ends with {bad}. {job.saver.advise()}.")
    for line in words if job.context.rank == 0 else ():
        to_stderr(f"megalite: {line}")
    return status


def record_failure(error: Exception, job: Job) -> None:
    """Record what ended this start, and say it on stderr. A UserError is said by the launcher; a TrainingStoppedError
    is known to all ranks, and its message says all. Otherwise this rank's own words come first, since whoever started
    it may kill it soon, then what the ranks find out together."""
    context, trains = job.context, job.phase != "start-up"
    is_known, is_refusal = isinstance(error, TrainingStoppedError), isinstance(error, UserError)
    message = str(error) if is_known or is_refusal else f"{type(error).__name__}: {error}"
    if is_known:
        job.saver.close()
    if trains:
        job.log.write(f"failed at step {job.progress.step + 1}\n{traceback.format_exc()}", "ERROR")
        if not (is_known and job.folder.lost()):  # else the record is another job's
            job.log.event("failed", job.progress.step, status=2 if is_refusal else 1, message=message)
    if is_known and context.rank == 0:
        to_stderr(f"megalite: stopped: {error}")
    if is_known or is_refusal:
        return
    if StopSignals.now is not None and StopSignals.now.starting and is_broken_link(error):
        time.sleep(NEWS_S)
    where = f"rank {context.rank} on {socket.gethostname()}{f', step {job.progress.step + 1}' if trains else ''}"
    to_stderr(f"megalite: {where}: {message}")
    if isinstance(error, torch.OutOfMemoryError):
        size = job.config.train.micro_batch_size
        smaller = f"{MICRO}={1 if size % 2 else size // 2}, " if size > 1 else ""
        saves = f"{smaller}train.recompute=full, or a larger parallel.tp or parallel.pp"
        to_stderr(f"megalite: less memory is needed with {saves}")
        with suppress(Exception):  # what helps to understand the failure must not become another
            path = write_memory(
                job.training, job.folder.path / "logs", context.rank, cuda=context.device.type == "cuda"
            )
            to_stderr(f"megalite: rank {context.rank}: the largest owners of memory: {path}")
    with stop_request():  # torchrun ends all ranks when the first one exits: not before this is said
        cause = find_cause(context, error)
    if cause:
        to_stderr(f"megalite: rank {context.rank} ends because of: {cause}")
    if trains:
        job.saver.close()

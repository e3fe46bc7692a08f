"""One run on this rank, from its settings to its exit status."""

import gc
import math
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from megalite.config.durable_files import private_files
from megalite.config.schema import Config
from megalite.data.open import Preparation, note_changed_files
from megalite.errors.problems import Problem, UserError, collect, to_stderr
from megalite.errors.words import several
from megalite.launch.agreement import together
from megalite.launch.context import ParallelContext
from megalite.launch.environment import ProcessEnvironment
from megalite.launch.failure_report import find_cause, is_broken_link
from megalite.launch.host import end_compile_workers
from megalite.launch.signals import StartUp, StopRequest
from megalite.launch.watchdog import Doing, Patience, Watchdog
from megalite.train.build import ReadWeights, start
from megalite.train.job import Job, build_job, open_training_data
from megalite.train.loop import Loop
from megalite.train.recorder import Recorder
from megalite.train.replicas import ReplicaMismatchError
from megalite.train.saving import Saver, TakenOverError, TrainingStoppedError
from megalite.train.status_file import StatusFile

NEWS_S = 1.0  # the signal that has ended another rank's start comes to this one, too, which has nothing to say then
START_UP = Doing("start-up", "start-up", math.inf)  # of a day of tokens to prepare, for example


def run(
    config: Config,
    environment: ProcessEnvironment,
    preparation: Preparation,
    read_weights: ReadWeights,
    recorder_of: Callable[[ParallelContext], Recorder],
    look_at_nodes: Callable[[ParallelContext, Path], Sequence[str]],
) -> int:
    """Train as `config` says, on this rank. Returns the exit status; raises UserError for input that is refused.

    `preparation` makes token files of text. `read_weights` reads the folder of checkpoint.init_from. `recorder_of`
    makes the recorder of a rank. `look_at_nodes` measures them for launch.preflight, and says what it found on rank 0.
    """
    began, limit = time.monotonic(), config.train.max_minutes
    problems: list[Problem] = []
    context = collect(lambda: start(config, environment), problems)
    if context is None:  # the device; one message refuses the data, too
        collect(lambda: preparation.examine(config), problems)
        raise UserError(problems)
    recorder = recorder_of(context)
    assert config.run_dir is not None, "derive() fills it in"
    status_file = config.launch.status_file if context.rank == 0 else None
    status = StatusFile(status_file, Path(config.run_dir), config.train.steps)
    job: Job | None = None
    saver: Saver | None = None
    failed = False
    try:
        with _watchdog_of_start_up(config, context) as watchdog:
            if config.launch.preflight:
                for line in look_at_nodes(context, Path(config.run_dir)):
                    recorder.note(f"preflight: {line}")
            data = open_training_data(config, context, environment, preparation, recorder.preparing)
            with private_files():
                together(context, status.examine)
                job = build_job(config, context, environment, data, read_weights, recorder.note)
                together(context, partial(status.begin, job.progress.step))
                if job.over:
                    status.end("finished", job.progress.step)
                    job.folder.withdraw()
                    recorder.note(f"already finished: step {job.progress.step} of {config.train.steps}")
                    return 0
                _open_record(job, recorder)
                saver = Saver(job, recorder, status.saved)
                left_s = None if limit is None else began + 60 * limit - time.monotonic()
                with StopRequest(left_s, "train.max_minutes") as stop:
                    return _train_to_the_end(job, stop, recorder, saver, status, watchdog)
    except UserError:
        raise
    except Exception as error:
        failed = True
        if StartUp.now is not None and is_broken_link(error):
            time.sleep(NEWS_S)
        _report_cause(error, context, job)
        if saver is not None:
            saver.close()
        raise
    finally:
        ended = StartUp.now is not None and StartUp.now.ends
        end_compile_workers()
        recorder.close()
        status.close("a signal before the first step" if ended else None)
        if job is not None:
            job.folder.close()
        context.close(failed=failed or ended)


def _open_record(job: Job, recorder: Recorder) -> None:
    """Open the run's record, and tell which token files have changed. A refusal leaves no new folder."""
    try:
        together(job.context, lambda: recorder.open(job))
    except UserError:
        job.folder.withdraw()
        raise
    if job.context.rank == 0:
        note_changed_files([part.file for part in job.data.train.parts], job.folder.path, recorder.note)


def _watchdog_of_start_up(config: Config, context: ParallelContext) -> Watchdog:
    assert config.run_dir is not None, "derive() fills it in"
    patience = Patience("parallel.startup_timeout_s", config.parallel.startup_timeout_s)
    hosts = [host for (host,) in context.gather_json([socket.gethostname()])]
    return Watchdog(context, lambda: START_UP, lambda: patience, Path(config.run_dir) / "logs", hosts)


def _train_to_the_end(
    job: Job, stop: StopRequest, recorder: Recorder, saver: Saver, told: StatusFile, watchdog: Watchdog
) -> int:
    recorder.run_started([*watchdog.hosts])
    loop, on_first = Loop(job, recorder, saver, stop), job.context.rank == 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        try:
            watchdog.follow(loop.doing, loop.patience)
            loop.run()
            stopped, step = loop.stopping and not loop.complete(), job.progress.step
            loop.finish(stopped=stopped)
        finally:
            watchdog.stop()
    except (TrainingStoppedError, ReplicaMismatchError) as error:  # known to all ranks, and said in full
        saver.close()
        recorder.failed(error, taken_over=isinstance(error, TakenOverError))
        if on_first:
            to_stderr(f"megalite: stopped: {error}")
        return 1
    except Exception as error:  # a UserError is known to all ranks, and said by the launcher
        recorder.failed(error)
        raise
    finally:
        gc.enable()
    status = 0 if saver.newest_step == step else 1
    by = (stop.requested or "a signal to another rank") if stopped else None
    told.end("failed" if status else "stopped" if stopped else "finished", step, by)
    recorder.finished(status, by)
    if status and on_first:
        kept = "there is no checkpoint" if saver.newest_step is None else f"the newest is of step {saver.newest_step}"
        to_stderr(f"megalite: the state of step {step} is not saved; {kept}")
    if count := job.progress.bad_steps_in_a_row:
        advice = saver.advise()
        if on_first:
            bad = f"{several(count, 'bad step')}: loss or gradient was not finite, nothing was applied"
            to_stderr(f"megalite: the run ends with {bad}. {advice}.")
    return status


def _report_cause(error: Exception, context: ParallelContext, job: Job | None) -> None:
    """This rank's own words first: whoever started it may kill it soon. Then what the ranks find out together."""
    where = f"rank {context.rank} on {socket.gethostname()}{f', step {job.progress.step + 1}' if job else ''}"
    to_stderr(f"megalite: {where}: {type(error).__name__}: {error}")
    if isinstance(error, torch.OutOfMemoryError):
        saves = "a smaller train.micro_batch_size, train.recompute=full, or a larger parallel.tp or parallel.pp"
        to_stderr(f"megalite: less memory is needed with {saves}")
    with StopRequest():  # torchrun ends all ranks when the first one exits: not before this is said
        cause = find_cause(context, error)
    if cause:
        to_stderr(f"megalite: rank {context.rank} ends because of: {cause}")

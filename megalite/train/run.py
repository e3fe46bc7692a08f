"""One run on this rank, from its settings to its exit status."""

import gc
import json
import math
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megalite.config.files import STATUS, absolute, private_files, write_atomically
from megalite.config.schema import Config
from megalite.data.open import TokenFiles, note_changed_files
from megalite.errors.problems import Problem, UserError, collect, to_stderr
from megalite.errors.words import several
from megalite.launch.context import ParallelContext, all_ranks_or_raise
from megalite.launch.environment import ProcessEnvironment, end_compile_workers
from megalite.launch.signals import StopSignals, stop_request
from megalite.launch.watchdog import Doing, Watchdog, find_cause, is_broken_link
from megalite.train.build import ReadWeights, open_context
from megalite.train.history import Note, RunLog, View
from megalite.train.loop import train
from megalite.train.saving import Saver, TrainingStoppedError
from megalite.train.setup import Job, open_training_data, set_up

JOB_BEGAN = "MEGALITE_JOB_BEGAN"  # seconds since the epoch
NEWS_S = 1.0  # the signal that ended another rank's start reaches this rank too, which then reports no error


class StatusFile:
    """Tells the script that started this job what has become of it: a file of one JSON object, at launch.status_file.

        {"state": "stopped", "step": 1200, "steps": 5000, "run_dir": "/scratch/run", "by": "SIGUSR1"}

    `running`: training, or killed; `stopped`: ended on request, saved, to be started again; `finished`: nothing
    remains; `failed`: look at the log. `step` is the newest that is saved. A start that ends before it has built its
    model writes nothing. For a batch script that exports JOB_BEGAN: steps that this start has `gained`, `start_up_s`
    from JOB_BEGAN on, and `step_s`, the mean of these steps with saves and evaluations, null before the first save.
    """

    def __init__(self, path: str | None, run_dir: Path, steps: int) -> None:
        self._path, self._fixed = Path(absolute(path)) if path else None, {"steps": steps, "run_dir": str(run_dir)}
        self.state, self._first, self._step, self._trains_s = "", 0, 0, 0.0

    def write(self, state: str, step: int | None = None, by: str | None = None) -> None:
        """The state from now on, and the step if one was saved. UserError where the first one cannot be written."""
        begins, self.state, self._step = not self.state, state, self._step if step is None else step
        if begins:
            self._first, self._trains_s = self._step, time.time()
        if self._path is None:
            return
        status = {"state": state, "step": self._step, **self._fixed, **({"by": by} if by else {})}
        if job_began := os.environ.get(JOB_BEGAN):
            gained = self._step - self._first
            status |= {"gained": gained, "start_up_s": round(self._trains_s - float(job_began), 1)}
            status["step_s"] = round((time.time() - self._trains_s) / gained, 3) if gained else None
        try:
            write_atomically(self._path, (json.dumps(status) + "\n").encode(), STATUS)
        except OSError as error:
            if begins:  # later the script sees the old state, and the run is saved
                self.state, remedy = "", "a file in a folder where you may write, on a disk with room"
                raise UserError(Problem("launch.status_file", str(self._path), f"{error.strerror}", remedy)) from error


class Companions(NamedTuple):
    """Functions of other packages that training is handed, so that it imports none of them."""

    examine: Callable[[Config], object]  # UserError for text or a tokenizer that is not there; quick, writes nothing
    prepare: Callable[[Config], TokenFiles]  # makes every token file that is not there yet
    read_weights: ReadWeights  # reads the folder of checkpoint.init_from
    look_at_nodes: Callable[[ParallelContext, Path], Sequence[str]]  # for launch.preflight; lines, on rank 0
    say: Note  # prints a line for the user, on rank 0
    open_views: Callable[[Job, Note], Sequence[View]]  # on rank 0
    about: Callable[[Job], dict[str, Any]]  # fields of the event of a start, on rank 0


def run(config: Config, environment: ProcessEnvironment, companions: Companions) -> int:
    """Train as `config` says, on this rank. Returns the exit status; raises UserError for input that is refused."""
    began, log = time.monotonic(), RunLog(companions.say)
    problems: list[Problem] = []
    context = collect(lambda: open_context(config, environment), problems)
    if context is None:  # the device; one message refuses the data, too
        collect(lambda: companions.examine(config), problems)
        raise UserError(problems)
    run_dir, minutes = Path(config.run_dir), config.train.max_minutes
    status = StatusFile(config.launch.status_file if context.rank == 0 else None, run_dir, config.train.steps)
    limit = ("parallel.startup_timeout_s", config.parallel.startup_timeout_s)
    start_up = Doing("start-up", "start-up", *limit, math.inf)  # a day of tokens to prepare, for example
    hosts = [host for (host,) in context.gather_json([socket.gethostname()])]
    job: Job | None = None
    saver: Saver | None = None
    failed = False
    try:
        with Watchdog(context, lambda: start_up, run_dir / "logs", hosts) as watchdog:
            if config.launch.preflight:
                for line in companions.look_at_nodes(context, run_dir):
                    log.note(f"preflight: {line}")
            data = open_training_data(config, context, environment, companions.prepare)
            with private_files():
                job = set_up(config, context, data, companions.read_weights, log, hosts)
                open_record(job, status, companions)
                if job.finished:
                    return 0
                saver = Saver(job, lambda step: status.write("running", step))
                left_s = None if minutes is None else began + 60 * minutes - time.monotonic()
                with stop_request(left_s, "train.max_minutes") as job.stop:
                    return train_to_the_end(job, saver, status, watchdog)
    except Exception as error:
        failed = not isinstance(error, UserError)
        if failed:
            report_cause(error, context, job)
        if failed and saver is not None:
            saver.close()
        raise
    finally:
        ended = StopSignals.now is not None and StopSignals.now.ended
        end_compile_workers()
        log.close()
        if status.state == "running":
            status.write("stopped" if ended else "failed", by="a signal before the first step" if ended else None)
        if job is not None:
            job.folder.close()
        context.close(failed=failed or ended)


def open_record(job: Job, status: StatusFile, companions: Companions) -> None:
    """Open the files that tell of this start; where nothing is left to do, say so. A refusal leaves no new folder."""
    step, context, log = job.progress.step, job.context, job.log
    try:
        all_ranks_or_raise(context, lambda: status.write("running", step))
        if job.finished:
            status.write("finished")
            job.folder.withdraw()
            log.note(f"already finished: step {step} of {job.config.train.steps}")
            return
        all_ranks_or_raise(context, lambda: log.open(job, companions.open_views))
    except UserError:
        job.folder.withdraw()
        raise
    if context.rank == 0:  # the others ask neither git nor the packages for their versions
        note_changed_files([part.file for part in job.data.train.parts], job.folder.path, log.note)
        log.event("start" if job.resumed_from is None else "resume", step, **companions.about(job))
        if job.config.train.sample_interval > 0 and job.config.train.sample_tokens > 0 and not job.prompts:
            log.note("no samples of text: the tokenizer of these tokens is not known")


def train_to_the_end(job: Job, saver: Saver, status_file: StatusFile, watchdog: Watchdog) -> int:
    """Train, and say how it ended: the exit status."""
    gc.collect()
    gc.freeze()
    gc.disable()
    words: list[str] = []
    try:
        watchdog.doing = job.doing
        train(job, saver)
    except Exception as error:
        job.log.write(f"failed at step {job.progress.step + 1}\n{traceback.format_exc()}", "ERROR")
        is_known = isinstance(error, TrainingStoppedError)  # to all ranks, and its message says all
        if is_known:
            saver.close()
        if not (is_known and job.folder.lost()):  # else it is another job's
            message = str(error) if is_known or isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            status = 2 if isinstance(error, UserError) else 1
            job.log.event("failed", job.progress.step, status=status, message=message)
        if not is_known:  # a UserError is said by the launcher
            raise
        words.append(f"stopped: {error}")
    else:
        watchdog.stop()  # views may take their time, and other ranks have ended
        words += end_of(job, saver, status_file)
    finally:
        watchdog.stop()
        gc.enable()
    for line in words if job.context.rank == 0 else ():
        to_stderr(f"megalite: {line}")
    return 0 if status_file.state in ("stopped", "finished") else 1


def end_of(job: Job, saver: Saver, status_file: StatusFile) -> list[str]:
    """Record how training ended; what the user must know of it."""
    step, words = job.progress.step, list[str]()
    by = job.stop.requested or "a signal to another rank" if job.stopping and not job.complete else None
    saved = saver.saved_step == step
    status_file.write(("stopped" if by else "finished") if saved else "failed", by=by)
    job.log.event("stopped" if by else "finished", step, status=int(not saved), **({"by": by} if by else {}))
    if not saved:
        kept = "there is no checkpoint" if saver.saved_step is None else f"the newest is of step {saver.saved_step}"
        words.append(f"the state of step {step} is not saved; {kept}")
    if count := job.progress.bad_steps_in_a_row:
        bad = f"{several(count, 'bad step')}: loss or gradient was not finite, nothing was applied"
        words.append(f"the run ends with {bad}. {saver.advise()}.")
    return words


def report_cause(error: Exception, context: ParallelContext, job: Job | None) -> None:
    """This rank's own words first: whoever started it may kill it soon. Then what the ranks find out together."""
    if StopSignals.now is not None and StopSignals.now.starting and is_broken_link(error):
        time.sleep(NEWS_S)
    where = f"rank {context.rank} on {socket.gethostname()}{f', step {job.progress.step + 1}' if job else ''}"
    to_stderr(f"megalite: {where}: {type(error).__name__}: {error}")
    if isinstance(error, torch.OutOfMemoryError):
        saves = "a smaller train.micro_batch_size, train.recompute=full, or a larger parallel.tp or parallel.pp"
        to_stderr(f"megalite: less memory is needed with {saves}")
    with stop_request():  # torchrun ends all ranks when the first one exits: not before this is said
        cause = find_cause(context, error)
    if cause:
        to_stderr(f"megalite: rank {context.rank} ends because of: {cause}")

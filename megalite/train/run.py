"""The training loop.

For each step: the next microbatches, one optimizer step, and what is due after it: a line of metrics, an evaluation, a
check of the replicas, a checkpoint. A step of train.skip_steps only consumes its samples and its turn. A stop signal
ends the run after the step in which all ranks learn of it, saved.
"""

import gc
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

import torch

from megalite.config.problems import Problem, UserError, collect
from megalite.config.schema import Config
from megalite.config.step_plan import PlannedStep, planned_steps
from megalite.data.batches import StepBatches, TrainBatches, masked_batches, validation_batches
from megalite.optim.schedule import learning_rate
from megalite.parallel.context import ParallelContext
from megalite.parallel.environment import ProcessEnvironment
from megalite.parallel.farewell import cause_of_the_end
from megalite.parallel.hosts import slow_tensor_parallelism
from megalite.parallel.startup import start
from megalite.train.evaluate import agreed_batches, mean_loss
from megalite.train.job import Job, agreed, build_job, find_text, open_training_data
from megalite.train.log import open_log
from megalite.train.pipeline_times import write_times
from megalite.train.profile import StepProfiler
from megalite.train.replicas import ReplicaMismatchError, check_replicas
from megalite.train.reporter import Reporter
from megalite.train.saving import Saver, TakenOverError
from megalite.train.signals import StopRequest
from megalite.train.step import LaunchedStep, StepFigures, TrainStep
from megalite.train.terminal import Terminal, to_stderr
from megalite.train.wandb_mirror import open_mirror

RANKS_EVERY = 50  # lines of metrics between two moments at which ranks tell each other of themselves, at most


class TrainingStoppedError(RuntimeError):
    """The run cannot go on; the message says why and what to try."""


@dataclass(frozen=True)
class Launched:
    """A step whose figures have not been read yet."""

    planned: PlannedStep
    figures: LaunchedStep | None = None  # None: it is passed over
    lr: float = 0.0
    wait_s: float = 0.0


class Loop:
    """Runs the steps of one job."""

    def __init__(self, job: Job, reporter: Reporter, saver: Saver, stop: StopRequest) -> None:
        self.job = job
        self.reporter = reporter
        self.saver = saver
        self.stop = stop
        self.step = TrainStep(job.training, job.config.optimizer, job.context)
        # An accelerator runs ahead of the host: its figures are read one step late. A CPU's are there at once.
        self.lateness = 0 if job.context.device.type == "cpu" else 1
        self.launched: deque[Launched] = deque()
        self.under_way = False  # the first step is done: from now on no rank is late for a good reason
        self.stopping = False
        self.problems: list[Problem] = []  # of the input that this rank has read
        self._coming = (planned for planned in self._plan() if not planned.skipped)  # whose data is to be fetched
        self._ahead: StepBatches | None = None  # of the step to come
        self._profiler = StepProfiler(
            job.folder.path, job.config.train.profile_steps, job.training.clock, job.context, reporter
        )
        self._least_loss_scale = job.config.optimizer.min_loss_scale

    def run(self) -> None:
        """All remaining steps, or as many as pass until a stop is asked for; leaves the last state saved."""
        batches = TrainBatches(
            self.job.data.train,
            self.job.config,
            self._plan(),
            dp_rank=self.job.context.index("dp"),
            dp_size=self.job.context.size("dp"),
            device=self.job.context.device,
        )
        try:
            for planned in self._plan():
                self._launch(planned, batches)
                self._read(keep=self.lateness)
                self._after(planned.step)
                if self.stopping:
                    break
            self._read(keep=0)
        except UserError:  # all ranks refuse the input that one of them has read: what was learned is kept
            if self.job.progress.step > 0:
                self.saver.save_last()
            raise
        finally:
            batches.close()
        self.job.training.gather.finish()
        self.saver.save_last()

    def _plan(self) -> Iterator[PlannedStep]:
        """The steps that remain."""
        train, progress = self.job.config.train, self.job.progress
        plan = planned_steps(train, done=progress.step, samples=progress.samples)
        return takewhile(lambda planned: planned.step <= train.steps, plan)

    def _launch(self, planned: PlannedStep, batches: TrainBatches) -> None:
        if planned.skipped:
            self.launched.append(Launched(planned))
            return
        if not self._profiler.due(planned.step):
            self._launch_training(planned, batches)
            return
        self._read(keep=0)
        with self._profiler.recording():
            self.reporter.restart_clock()
            self._launch_training(planned, batches)
            self._read(keep=0)  # here: its time ends before the profiler's work begins

    def _launch_training(self, planned: PlannedStep, batches: TrainBatches) -> None:
        config, step = self.job.config, planned.step
        data = self._ahead or self._fetch(batches)
        assert data is not None, "this step trains"
        stop, refused = self.stop.requested is not None, bool(self.problems)
        self._ahead = self._fetch(batches)
        tokens_ahead = None if self._ahead is None else self._ahead.local_tokens
        lr = learning_rate(step - 1, config.lr, peak=config.optimizer.lr, steps=config.train.steps)
        with self._recorded(step):
            figures = self.step(
                data.microbatches,
                data.local_tokens,
                lr,
                stop=stop,
                refused=refused,
                next_local_tokens=tokens_ahead,
            )
        self.launched.append(Launched(planned, figures, lr, data.wait_s))

    def _fetch(self, batches: TrainBatches) -> StepBatches | None:
        """The next microbatches, None after the last; masked ones where they are refused, of which the other ranks
        learn in their step."""
        config, context = self.job.config, self.job.context
        if (coming := next(self._coming, None)) is None:
            return None
        try:
            with self.job.training.clock.within("data"):
                return next(batches)
        except UserError as error:
            self.problems = error.problems
            masked = masked_batches(config, coming.sequences, context.size("dp"), context.device)
            return StepBatches(masked, local_tokens=0, wait_s=0.0)

    @contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        """The pipeline's times of every train.record_pipeline-th step."""
        config, job = self.job.config, self.job
        if config.train.record_pipeline == 0 or step % config.train.record_pipeline:
            yield
            return
        with job.training.executor.recording() as spans:
            yield
        assert config.parallel.schedule is not None, "derive() fills it in"
        write_times(job.folder.path, step, config.parallel.schedule, spans, job.context)

    def _read(self, *, keep: int) -> None:
        """Read the figures of all launched steps but the newest `keep`."""
        while len(self.launched) > keep:
            launched = self.launched.popleft()
            progress = self.job.progress
            if launched.figures is None:
                progress.consume(launched.planned)
                self.reporter.skipped_on_request(progress.step)
                continue
            figures = launched.figures.read()
            if not self.under_way:
                self.job.context.set_timeout(self.job.config.parallel.timeout_s)
                self.under_way = True
            if figures.refused:
                self.job.context.agree(self.problems)
            self.stopping = self.stopping or figures.stop
            progress.consume(launched.planned)
            progress.tokens += figures.tokens
            progress.bad_steps += figures.skipped
            progress.bad_steps_in_a_row = self._bad_steps_in_a_row(figures)
            self.reporter.step(
                progress,
                figures,
                lr=launched.lr,
                wait_s=launched.wait_s,
                sequences=launched.planned.sequences,
                time_split=launched.figures.lap.read(),
            )
            if progress.bad_steps_in_a_row >= self.job.config.train.max_bad_steps:
                self._give_up(figures)

    def _bad_steps_in_a_row(self, figures: StepFigures) -> int:
        """While fp16 looks for its loss scale it skips steps on purpose: they count once the scale is at its least."""
        before = self.job.progress.bad_steps_in_a_row
        if not figures.skipped:
            return 0
        falling = self.job.training.loss_scale is not None and figures.loss_scale > self._least_loss_scale
        return before if falling else before + 1

    def _after(self, step: int) -> None:
        """Whatever is due after `step`; reading the figures first where something is."""
        self.saver.tell()
        train = self.job.config.train
        evaluate = train.eval_interval > 0 and (step % train.eval_interval == 0 or step == train.steps)
        check = train.check_replicas_every > 0 and step % train.check_replicas_every == 0
        sample = train.sample_interval > 0 and step % train.sample_interval == 0
        pause = evaluate or sample or self.saver.due(step) or self._profiler.due(step)
        if pause or check:
            self._read(keep=0)
        if check:
            check_replicas(self.job.training, self.job.context, step)
        if evaluate and self.job.data.validation is not None:
            self._evaluate(step)
        if sample:
            self.reporter.sample(step)
        if self._profiler.due(step):
            self._profiler.write(step)
        if self.saver.due(step):
            self.saver.save()
        if pause or step % (RANKS_EVERY * train.log_interval) == 0:
            self.reporter.ranks(step)
        if pause:
            gc.collect()  # collection is off between these points: it would pause ranks at different times
            self.reporter.restart_clock()

    def _evaluate(self, step: int) -> None:
        job = self.job
        assert job.data.validation is not None
        begin = time.perf_counter()
        batches = validation_batches(
            job.data.validation,
            job.config,
            dp_rank=job.context.index("dp"),
            dp_size=job.context.size("dp"),
            device=job.context.device,
        )
        loss = mean_loss(job.training, job.context, agreed_batches(job.context, batches))
        self.reporter.evaluation(step, loss, seconds=time.perf_counter() - begin)

    def _give_up(self, figures: StepFigures) -> None:
        count = self.job.progress.bad_steps_in_a_row
        self.saver.settle()
        newest = self.saver.newest_step
        kept = f"The checkpoint of step {newest} is intact" if newest is not None else "No checkpoint was written yet"
        raise TrainingStoppedError(
            f"loss or gradient was not finite in {count} steps in a row (now step {self.job.progress.step}: loss "
            f"{figures.loss}, gradient norm {figures.grad_norm}); none of them was applied. {kept}. Try a lower "
            "optimizer.lr, a longer lr.warmup_steps, a smaller optimizer.clip_grad, precision=fp32, or look at the "
            "data of these steps; train.max_bad_steps sets the patience."
        )


def run(config: Config, environment: ProcessEnvironment) -> int:
    """Train as `config` says, on this rank. Returns the exit status; raises UserError for input that is refused."""
    problems: list[Problem] = []
    context = collect(lambda: start(config, environment), problems)
    if context is None:  # the device: the same message tells of the data
        collect(lambda: find_text(config), problems)
        raise UserError(problems)
    terminal = Terminal(sys.stdout, interactive=sys.stdout.isatty(), enabled=context.rank == 0)
    job: Job | None = None
    reporter: Reporter | None = None
    saver: Saver | None = None
    failed = False
    try:
        data = open_training_data(config, context, environment, terminal.preparing)
        job = build_job(config, context, data, terminal.note)
        reporter = _open_reporter(job, terminal)
        saver = Saver(job, reporter)
        if warning := slow_tensor_parallelism(context):
            terminal.note(warning)
        with StopRequest() as stop:
            return _train(job, terminal, stop, reporter, saver)
    except UserError:
        raise
    except Exception as error:
        failed = True
        _tell_cause(error, context, job)
        if saver is not None:
            saver.close()
        raise
    finally:
        if reporter is not None:
            reporter.close()
        if job is not None:
            job.folder.close()
        terminal.close()
        context.close(failed=failed)


def _tell_cause(error: Exception, context: ParallelContext, job: Job | None) -> None:
    """This rank's own words first: whoever started it may kill it soon. Then what the ranks find out together."""
    where = f"rank {context.rank} on {socket.gethostname()}{f', step {job.progress.step + 1}' if job else ''}"
    to_stderr(f"megalite: {where}: {type(error).__name__}: {error}")
    if isinstance(error, torch.OutOfMemoryError) and job is not None:
        to_stderr(f"megalite: {_less_memory(job.config)}")
    with StopRequest():  # torchrun ends all ranks when the first one exits: not before this is said
        cause = cause_of_the_end(context, error)
    if cause:
        to_stderr(f"megalite: rank {context.rank} ends because of: {cause}")


def _less_memory(config: Config) -> str:
    """What to try where an accelerator's memory has run out."""
    train = config.train
    micro = train.micro_batch_size or 1
    next_below = max((size for size in range(1, micro) if micro % size == 0), default=None)
    smaller = f"train.micro_batch_size={next_below} (now {micro}), " if next_below else ""
    recompute = "" if train.recompute == "full" else f"train.recompute=full (now {train.recompute}), "
    return f"less memory is needed with {smaller}{recompute}or a larger parallel.tp or parallel.pp"


def _open_reporter(job: Job, terminal: Terminal) -> Reporter:
    def opened() -> Reporter:
        folder = job.folder.path
        mirror = open_mirror(job.config, folder, terminal.note) if job.context.rank == 0 else None
        return Reporter(job, terminal, open_log(folder, job.context), mirror)

    return agreed(job.context, opened)


def _train(job: Job, terminal: Terminal, stop: StopRequest, reporter: Reporter, saver: Saver) -> int:
    reporter.start()
    if job.resumed_from is not None and job.progress.step >= job.config.train.steps:
        reporter.nothing_to_do()
        return 0
    loop = Loop(job, reporter, saver, stop)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        loop.run()
    except UserError as error:  # known to all ranks, and said by the launcher
        reporter.failed(error)
        raise
    except (
        TrainingStoppedError,
        ReplicaMismatchError,
        TakenOverError,
    ) as error:  # known to all ranks, and said in full
        saver.close()
        reporter.failed(error, taken_over=isinstance(error, TakenOverError))
        if job.context.rank == 0:
            to_stderr(f"megalite: stopped: {error}")
        return 1
    except Exception as error:
        reporter.failed(error)
        raise
    finally:
        gc.enable()
    stopped = loop.stopping and job.progress.step < job.config.train.steps
    status = 0 if saver.newest_step == job.progress.step else 1
    reporter.finish(status, stopped_by=(stop.requested or "a signal to another rank") if stopped else None)
    if status and job.context.rank == 0:
        kept = "there is no checkpoint" if saver.newest_step is None else f"the newest is of step {saver.newest_step}"
        to_stderr(f"megalite: the state of step {job.progress.step} is not saved; {kept}")
    return status

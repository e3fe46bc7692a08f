"""The training loop.

For each step: the next batch, one optimizer step, and what is due after it: a check of the replicas, an evaluation, a
checkpoint, a sample of text. A step of train.skip_steps only consumes its samples. A stop signal ends the run after the
step in which all ranks learn of it, saved. It also breaks off an evaluation at its next batch, which the next start
repeats, and a sample of text at its next token.
"""

import gc
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megalite.checkpoint.remote import Remote
from megalite.checkpoint.run_folder import RunFolder
from megalite.config.files import write_atomically
from megalite.config.phases import RunPhase
from megalite.config.schedule_request import SPLITTING
from megalite.config.schema import HELD_OUT, Config
from megalite.config.settings import DERIVED, OPEN, as_plain, value_of, with_values
from megalite.config.step_plan import due_after, micro_batch_is_fixed, newest_step, planned_steps
from megalite.data.batches import StepBatches, train_batches, validation_batches
from megalite.data.open import OpenedData
from megalite.data.samples import Position
from megalite.errors.problems import Problem, UserError, refuse, several
from megalite.launch.context import ParallelContext, all_ranks_or_raise, rank0_broadcast
from megalite.launch.process import StopSignals
from megalite.launch.watchdog import SAVES, Doing, after_report_s
from megalite.optim.schedule import step_rates
from megalite.pipeline.simulator import Span
from megalite.train.build import MICRO, Training, data_share
from megalite.train.evaluate import ValidationMetrics, evaluate, evaluation_record, sample
from megalite.train.history import PIPELINE, Record, RunLog, StatusFile, StepPart
from megalite.train.metrics import Meter
from megalite.train.origin import find_origin
from megalite.train.ranges import named_ranges
from megalite.train.saving import Progress, Saver, TrainingStoppedError, check_replicas, roll_back
from megalite.train.step import PendingMetrics, TrainStep

# The host runs ahead of an accelerator, whose metrics are read one step late. A CPU's are there at once.
LATENESS = {"cpu": 0, "cuda": 1}
PROFILES, ROWS = "profile", 60  # the folder in a run's, and rows of its tables
Phase = Literal["start-up", "training", "in a save", "in a rollback"]  # of a rank
# Times the time-out: tokens may take a day.
PATIENCE: dict[Phase, float] = {"start-up": inf, "in a save": SAVES, "in a rollback": SAVES}
# Every n steps (0: never), or every n tokens; at the end too; what.
Hook = tuple[tuple[int, int | None], bool, Callable[[int], None]]
BROKEN_OFF = "asked to stop: the {} after step {} is broken off, nothing of it is recorded"


@dataclass
class Job:
    """One run on this rank: all that it consists of, and where it stands. A start fills it, the loop moves it on."""

    config: Config  # of the phase that the run is in
    context: ParallelContext
    hosts: list[str]  # where each rank runs
    log: RunLog
    status: StatusFile
    base: Config = field(init=False)  # of the whole run
    plan: list[RunPhase] = field(init=False)
    opened: list[OpenedData | None] = field(init=False)  # the data of each phase; None where it is over
    data: OpenedData = field(init=False)  # of the phase, from the run's place in it on
    remote: Remote | None = field(init=False)
    folder: RunFolder = field(init=False)
    training: Training = field(init=False)
    prompts: dict[str, list[int]] = field(init=False)  # of the samples of text, and their tokens
    saver: Saver = field(init=False)
    meter: Meter = field(init=False)
    progress: Progress = field(default_factory=Progress)
    position: Position = field(default_factory=Position)
    begun: list[dict[str, Any]] = field(default_factory=list)  # phases, as `begun_phase` keeps them

    # From the checkpoint that the run continues from, and from the records beside it.
    resumed_from: int | None = None  # step of the checkpoint
    tokenizer_files: dict[str, str] = field(default_factory=dict)  # name -> hash
    seals: dict[str, Any] = field(default_factory=dict)  # of the files of the record
    measured: Record = field(default_factory=dict)  # the newest line of a step
    finished: bool = False  # an earlier start has done and recorded everything: this one has no step to do

    # Where this start stands.
    stop: StopSignals = field(default_factory=StopSignals)
    stopping: bool = False  # all ranks know that one of them was asked to stop
    problems: list[Problem] = field(default_factory=list)  # of the input that this rank has read: no step is applied
    under_way: bool = False  # the first step is done: from now on parallel.timeout_s holds, not startup_timeout_s
    phase: Phase = "start-up"
    begun_step: int = 0
    evaluated_step: int = -1  # the newest one

    def go_on(self) -> bool:
        """Whether no rank was asked to stop; collective, one small all-reduce on the host."""
        self.stopping = self.stopping or any(self.context.gather_json([True] if self.stop.requested else []))
        return not self.stopping

    def is_logged(self, step: int) -> bool:
        """Whether a line of metrics is due after it."""
        return step % self.config.train.log_interval == 0 or step == self.now.end

    def owes_evaluation(self) -> bool:
        """Whether the evaluation that is due after the newest step has not been done."""
        step, train = self.progress.step, self.config.train
        evaluates = bool(self.data.evaluated) and step > 0 and self.evaluated_step != step
        if not evaluates or step == self.now.end:
            return evaluates
        newest = newest_step(train, step, self.progress.samples)
        return due_after(newest, train, train.eval_interval, train.eval_interval_tokens)

    @property
    def now(self) -> RunPhase:
        """The phase that has begun last."""
        return self.plan[len(self.begun) - 1]

    @property
    def fault(self) -> str:
        """What keeps a step from being applied, for messages."""
        return "loss or gradient was not finite" + (" or a spike" if self.config.train.skip_spikes else "")

    @property
    def complete(self) -> bool:
        """Whether nothing of the run remains to be done."""
        return self.progress.step >= self.config.train.steps and not self.owes_evaluation()

    def doing(self) -> Doing:
        """This rank's place in training, for the watchdog."""
        setting = "timeout_s" if self.under_way else "startup_timeout_s"
        limit = (f"parallel.{setting}", getattr(self.config.parallel, setting))
        if (phase := self.phase) in PATIENCE:  # read once: the watchdog's threads ask
            return Doing(phase, phase, *limit, PATIENCE[phase])
        part, executor = self.training.clock.part, self.training.executor
        words = f"step {self.begun_step}, {part}, pass {executor.at or 'none yet'}"
        return Doing((self.begun_step, self.evaluated_step, part, executor.performed), words, *limit)


def train_phase(job: Job) -> None:
    """The remaining steps of a phase. Where memory runs out before the first update, they begin again, once, with half
    the microbatch."""
    train_step = TrainStep(job.training, job.config.optimizer, job.context)
    half, rest = divmod(job.config.train.micro_batch_size, 2)
    chosen = MICRO in job.config.derived and not rest and not micro_batch_is_fixed(job.config)
    alone = job.context.world_size == 1 and job.config.parallel.schedule not in SPLITTING  # no work is put off
    try:
        return take_steps(job, train_step)
    except torch.OutOfMemoryError:
        if train_step.updates or not chosen or not alone:
            raise
    # Only now: the error held what the step had computed. Nothing but gradients has changed, which a step forgets.
    job.config, job.base = (with_values(one, {MICRO: half}) for one in (job.config, job.base))
    gc.collect()
    torch.cuda.empty_cache()  # does nothing on a CPU
    words = f"out of memory before the first update: the step begins again with {MICRO}={half}, which was {2 * half}"
    job.log.event("settings_changed", job.progress.step, settings={MICRO: half}, message=words)
    record_settings(job)
    return take_steps(job, train_step)


def record_settings(job: Job) -> None:
    """Write the run's config.yaml, and that the folder holds a run; collective."""
    derived = [name for name in job.base.derived if value_of(job.base, name) not in OPEN]
    rank0_broadcast(job.context, lambda: job.folder.begin(as_plain(job.base) | {DERIVED: derived}))


def take_steps(job: Job, train_step: TrainStep) -> None:
    """The remaining steps of the phase; an out-of-memory error is raised."""
    config, saver, clock, settings = job.config, job.saver, job.training.clock, job.config.train
    job.meter = Meter(config, job.context, job.measured)
    device, evaluates = job.context.device, bool(job.data.evaluated)
    launched = deque[tuple[StepBatches, PendingMetrics | None]]()  # steps whose metrics have not been read yet
    evaluations = (settings.eval_interval, settings.eval_interval_tokens) if evaluates else (0, None)
    hooks: list[Hook] = [
        ((settings.check_replicas_every, None), False, partial(check_replicas, job.training, job.context)),
        (evaluations, evaluates, partial(evaluate_model, job)),
        ((config.checkpoint.interval, config.checkpoint.interval_tokens), True, saver.save),
        ((settings.sample_interval, None), True, partial(sample_text, job)),
    ]

    def read(keep: int) -> None:
        while len(launched) > keep:
            account(job, *launched.popleft())

    steps = planned_steps(settings, done=job.progress.step, samples=job.progress.samples)
    steps = takewhile(lambda planned: planned.step <= job.now.end, steps)
    try:
        with train_batches(job.data.train, config, steps, device, data_share(job.context)) as batches:
            if job.owes_evaluation():
                evaluate_model(job, job.progress.step)
            clock.restart()
            with clock.within("data"):
                data = next(batches, None)
            while data is not None and not job.stopping:
                step = job.begun_step = data.planned.step
                is_last = step == job.now.end
                due = [do for n, at_end, do in hooks if (at_end and is_last) or due_after(data.planned, settings, *n)]
                profiles = step in settings.profile_steps and not data.planned.skipped
                if profiles:
                    read(keep=0)
                with profiled_step(job, step) if profiles else nullcontext():
                    with clock.within("data"):
                        coming = next(batches, None)  # now: the number of its tokens travels with this step's sums
                    job.training.executor.profiled = profiles
                    launched.append((data, launch(job, train_step, data, coming)))
                    read(keep=0 if due or profiles else LATENESS[device.type])
                if owes_rollback(job):
                    read(keep=0)  # a step that was launched since may be applied: then the run has recovered
                if owes_rollback(job):
                    roll_back(job)
                    due += [] if saver.save in due else [saver.save]  # the newest state is a good one again
                for hook in due:
                    hook(step)
                saver.report()
                if due or profiles:  # a pause, whose time counts in no step
                    job.meter.compare_ranks(job.log, job.hosts, step)
                    gc.collect()  # collection is off between pauses: it would stop ranks at different times
                    clock.restart()
                data = coming
            read(keep=0)
    except UserError:  # all ranks refuse the input that one of them has read: what was learned is kept
        if job.progress.step > 0:
            saver.save_last()
        raise
    job.training.gather.finish()


def owes_rollback(job: Job) -> bool:
    """Whether so many steps in a row were not applied that the run goes back to a checkpoint."""
    most = job.config.train.rollback_after
    return most is not None and job.progress.bad_steps_in_a_row >= most


def launch(job: Job, train_step: TrainStep, data: StepBatches, coming: StepBatches | None) -> PendingMetrics | None:
    """Hand a step to the device; `coming` is the data of the step after it. None: a step of train.skip_steps."""
    if data.planned.skipped:
        job.training.clock.restart()  # a step that computes nothing takes no time
        return None
    every, step = job.config.train.record_pipeline, data.planned.step
    lr, decay = step_rates(step - 1, job.plan)
    job.problems = job.problems or data.problems
    apart, layers = job.config.log.layer_norms_interval, job.training.layer_norms
    layers = layers if apart and step % apart == 0 else None
    watching = nullcontext() if layers is None else layers.watching()
    with watching, job.training.executor.recording() if every and step % every == 0 else nullcontext() as spans:
        metrics = train_step(
            data.microbatches,
            data.local_tokens,
            lr,
            decay_factor=decay,
            stop=job.stop.requested is not None,
            refused=bool(job.problems),
            next_local_tokens=None if coming is None or coming.planned.skipped else coming.local_tokens,
            measures=job.is_logged(step),
            layers=layers,
        )
    if spans is not None:
        record_pipeline(job, step, spans)
    return metrics


def account(job: Job, data: StepBatches, pending: PendingMetrics | None) -> None:
    """Read the metrics of a step, which waits for the device, and let them count for the run. UserError on all ranks
    where the input of one was refused."""
    progress, train, step = job.progress, job.config.train, data.planned.step
    metrics = None if pending is None else pending.read()
    if metrics is not None:
        if not job.under_way:
            job.context.set_timeout(after_report_s(job.config.parallel.timeout_s))
            job.under_way = True
        if metrics.refused:
            all_ranks_or_raise(job.context, partial(refuse, job.problems))
        job.stopping = job.stopping or metrics.stop
    progress.step, progress.samples = step, data.planned.first + data.planned.sequences
    if metrics is None:
        job.log.event("skipped_on_request", step)
    elif metrics.batch_tokens == 0:  # neither applied nor bad
        progress.empty_steps += 1
        job.log.event("empty", step)
    else:
        job.meter.add(metrics, data)
        if metrics.skipped:
            spike = isfinite(metrics.loss) and isfinite(metrics.grad_norm)
            scale, progress.bad_steps, before = metrics.loss_scale, progress.bad_steps + 1, progress.bad_steps_in_a_row
            progress.bad_steps_in_a_row += spike or scale is None or scale <= job.config.optimizer.min_loss_scale
            kind, found = "spike" if spike else "skipped", dict[str, Any]()
            if not spike and progress.bad_steps_in_a_row == 1 > before:  # the first, and no search for a loss scale
                found = find_origin(job, data, metrics.batch_tokens, scale)
                job.training.clock.restart()
            job.log.event(kind, step, loss=metrics.loss, grad_norm=metrics.grad_norm, loss_scale=scale, **found)
        else:
            progress.bad_steps_in_a_row, progress.last_applied = 0, step
            progress.tokens += metrics.batch_tokens
    is_due = job.is_logged(step)
    if is_due and (line := job.meter.line(tokens=progress.tokens, bad_steps=progress.bad_steps)) is not None:
        job.log.add(line)
        job.measured = line
    bad, patience = progress.bad_steps_in_a_row, inf if train.rollback_after else train.max_bad_steps
    if metrics is not None and bad >= patience:
        raise TrainingStoppedError(
            f"{job.fault} in {several(bad, 'step')} in a row (now step {step}: loss "
            f"{metrics.loss}, gradient norm {metrics.grad_norm}); none of them was applied. {job.saver.advise()}; "
            "train.max_bad_steps sets the patience."
        )


def record_pipeline(job: Job, step: int, spans: Sequence[Span]) -> None:
    """Record when the ranks of the first pipeline did what, in the time of day: the one clock that hosts share."""
    place, since = job.context.coordinates, time.time() - time.perf_counter()
    first = all(place[axis] == 0 for axis in place if axis != "pp")
    mine = [(str(action), start + since, end + since) for action, start, end in spans] if first else []
    everyone, members = job.context.gather_json(mine), job.context.members("pp-forward")
    fields = {"step": step, "schedule": str(job.config.parallel.schedule), "pp": len(members)}
    for number, rank in enumerate(members):
        job.log.append(PIPELINE, {**fields, "rank": number, "actions": everyone[rank]})


def evaluate_model(job: Job, step: int) -> None:
    """What is held out, and the sets of data.validation, after a step."""
    begin, share = time.perf_counter(), data_share(job.context)
    found: dict[str, list[ValidationMetrics]] = {name: [] for name in job.data.evaluated}
    kept = job.training.buffers.kept  # masters, maybe averages: on all ranks, also of a stage without parameters
    for weights in (nullcontext, job.training.averaged)[: len(kept)]:
        with weights():
            for name, source in job.data.evaluated.items():
                batches = validation_batches(source, job.config, job.context.device, share)
                metrics = evaluate(job.training, job.context, batches, job.data.bytes_of_ids, job.go_on)
                if metrics is None:
                    job.log.note(BROKEN_OFF.format("evaluation", step))
                    return
                found[name].append(metrics)
    job.evaluated_step, sets = step, {name: evaluation_record(*its) for name, its in found.items()}
    line: Record = {"step": step, "tokens": job.progress.tokens}
    line |= {f"val_{name}": value for name, value in sets.pop(HELD_OUT, {}).items()}
    line |= {"validation": sets} if sets else {}
    job.log.add(line | {"eval_time_s": time.perf_counter() - begin})


def sample_text(job: Job, step: int) -> None:
    """Text from the model after a step. All ranks call it; each model writes the same, so that ranks stay together when
    a stop ends it."""
    train, tokenizer = job.config.train, job.data.tokenizer
    if tokenizer is None or not job.prompts:
        return
    rows, prompts = train.micro_batch_size if train.compile else None, [*job.prompts.values()]
    shape: dict[str, Any] = {"count": train.sample_tokens, "seq_length": train.seq_length, "rows": rows}
    texts = sample(job.training, job.context, prompts, **shape, seed=job.config.seed, go_on=job.go_on)
    if any(len(text) < train.sample_tokens for text in texts):
        job.log.note(BROKEN_OFF.format("sample of text", step))
        return
    for prompt, tokens in zip(job.prompts, texts, strict=True):
        job.log.event("sample", step, prompt=prompt, text=tokenizer.decode(tokens))


@contextmanager
def profiled_step(job: Job, step: int) -> Iterator[None]:
    """Profile the step that happens inside, up to the reading of its metrics (train.profile_steps). Such a step waits
    for its device. Each rank leaves a trace for ui.perfetto.dev, with the step and its parts as labelled ranges, and a
    table of the costliest operations, or a warning."""
    clock, cuda, label = job.training.clock, job.context.device.type == "cuda", ExitStack()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    chunks, thread, listener_before = job.training.chunks, threading.get_ident(), clock.listener

    def begin(part: StepPart) -> None:
        """The part that was open ends. Another thread's view of it (autograd's) is not the step's."""
        if threading.get_ident() == thread:
            label.close()
            label.enter_context(record_function(f"part: {part}"))

    with profile(activities=activities) as record, record_function("train step"), label, named_ranges(chunks):
        clock.listener = begin
        clock.restart()
        try:
            yield
        finally:
            clock.listener = listener_before
        job.training.gather.finish()  # a transfer that ends later would write into freed memory of torch's
        if cuda:
            torch.cuda.synchronize(job.context.device)
    path = job.folder.path / PROFILES / f"step-{step:08d}-rank-{job.context.rank:05d}"
    table = record.key_averages().table(sort_by=f"self_{'device' if cuda else 'cpu'}_time_total", row_limit=ROWS)
    try:
        path.parent.mkdir(exist_ok=True)
        write_atomically(path.with_suffix(".txt"), f"{table}\n".encode())
        with tempfile.TemporaryDirectory(prefix="megalite-") as folder:
            record.export_chrome_trace(trace := f"{folder}/trace.json.gz")
            write_atomically(path.with_suffix(".trace.json.gz"), Path(trace).read_bytes())
        job.log.event("profile", step, folder=str(path.parent))
    except OSError as error:
        job.log.note(f"warning: the profile of step {step} could not be kept: {error}")

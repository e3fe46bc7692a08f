"""The training loop.

For each step: the next microbatches, one optimizer step, and what is due after it: a record of its figures, a check of
the replicas, an evaluation, a sample of text, a checkpoint. A step of train.skip_steps only consumes its samples. A
stop signal ends the run after the step in which all ranks learn of it, saved. An evaluation or a sample of text ends at
its next batch or token, and the next start makes up for the evaluation.
"""

import gc
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import takewhile
from typing import NamedTuple

from torch.profiler import profile

from megalite.config.step_plan import planned_steps
from megalite.data.batches import StepBatches, TrainBatches, validation_batches
from megalite.errors.problems import Problem, UserError
from megalite.errors.words import several
from megalite.launch.agreement import agree
from megalite.launch.signals import StopRequest
from megalite.launch.watchdog import SAVES, Doing, Patience, after_report_s
from megalite.optim.schedule import learning_rate
from megalite.pipeline.simulator import Span
from megalite.train.build import data_share
from megalite.train.clock import chrome_trace, profiled
from megalite.train.evaluate import evaluate
from megalite.train.history import StepPart
from megalite.train.job import Job
from megalite.train.metrics import Meter, StepMetrics
from megalite.train.replicas import check_replicas
from megalite.train.run_log import RunLog
from megalite.train.sample import sample
from megalite.train.saving import Saver, TrainingStoppedError
from megalite.train.step import PendingMetrics, TrainStep
from megalite.train.trace import PROFILES, write_profile

RANKS_EVERY = 50  # records between two moments at which ranks gather what each of them takes, at most


class PendingStep(NamedTuple):
    """A step whose figures have not been read yet."""

    data: StepBatches
    lr: float = 0.0
    metrics: PendingMetrics | None = None  # None: it is passed over


class Loop:
    """Runs the steps of one job."""

    def __init__(self, job: Job, log: RunLog, saver: Saver, stop: StopRequest, hosts: Sequence[str]) -> None:
        self.job, self.config, self.context = job, job.config, job.context
        self.log, self.hosts = log, hosts  # hosts: where each rank runs
        self.saver = saver
        self.stop = stop
        self.train_step = TrainStep(job.training, job.config.optimizer, job.context)
        self.meter = Meter(job.config, job.context, job.measured)
        # An accelerator runs ahead of the host: its figures are read one step late. A CPU's are there at once.
        self.lateness = 0 if job.context.device.type == "cpu" else 1
        self.pending: deque[PendingStep] = deque()
        self.profile: profile | None = None  # of the step before, if it was profiled
        self.problems: list[Problem] = []  # of the input that this rank has read: from then on no step is applied
        self.under_way = False  # the first step is done: from now on no rank is late for a good reason
        self.newest_step = job.progress.step  # that was begun
        self.stopping = False
        self.evaluated_step = job.progress.step if job.evaluated else -1
        self.sampled_step = -1
        self.gathered_step = -1  # the newest after which ranks gathered their figures

    def run(self) -> None:
        """All remaining steps, or as many as pass until a stop is asked for; leaves the last state saved."""
        job, train, context = self.job, self.config.train, self.context
        plan = planned_steps(train, done=job.progress.step, samples=job.progress.samples)
        plan = takewhile(lambda planned: planned.step <= train.steps, plan)
        share = data_share(self.config, context)
        try:
            with TrainBatches(job.data.train, self.config, plan, **share, device=context.device) as batches:
                if job.resumed_from is not None and self._owes_evaluation():
                    self._evaluate(job.progress.step)
                self.job.training.clock.restart()
                coming = self._fetch(batches)
                while (data := coming) is not None and not self.stopping:
                    coming = self._launch(data, batches)
                    self._read(keep=self.lateness)
                    self._after(data.planned.step)
                self._read(keep=0)
        except UserError:  # all ranks refuse the input that one of them has read: what was learned is kept
            if job.progress.step > 0:
                self.saver.save_last()
            raise
        job.training.gather.finish()
        self.saver.save_last()

    # --- one step ----------------------------------------------------------------------------------------------------

    def _fetch(self, batches: TrainBatches) -> StepBatches | None:
        """The data of the next step, None after the last."""
        with self.job.training.clock.within("data"):
            return next(batches, None)

    def _launch(self, data: StepBatches, batches: TrainBatches) -> StepBatches | None:
        """Launch the step, profiled if that is asked for; the data of the next one."""
        self.newest_step = step = data.planned.step
        if data.planned.skipped:
            self.pending.append(PendingStep(data))
            coming = self._fetch(batches)
            self.job.training.clock.restart()  # a step that computes nothing takes no time
            return coming
        if step not in self.config.train.profile_steps:
            return self._launch_step(data, batches)
        self._read(keep=0)
        with profiled(self.job.training.clock, self.context.device) as self.profile:
            self.job.training.clock.restart()
            coming = self._launch_step(data, batches)
            self._read(keep=0)  # here: its time ends before the profiler's work begins
            self.job.training.gather.finish()  # torch notes a transfer's end where its record was, freed or not
        return coming

    def _launch_step(self, data: StepBatches, batches: TrainBatches) -> StepBatches | None:
        train, step, stop = self.config.train, data.planned.step, self.stop.requested is not None
        lr = learning_rate(step - 1, self.config.lr, peak=self.config.optimizer.lr, steps=train.steps)
        coming = self._fetch(batches)
        self.problems = self.problems or data.problems
        is_recorded = train.record_pipeline > 0 and step % train.record_pipeline == 0
        with self.job.training.executor.recording() if is_recorded else nullcontext() as spans:
            metrics = self.train_step(
                data.microbatches,
                data.local_tokens,
                lr,
                stop=stop,
                refused=bool(self.problems),
                next_local_tokens=None if coming is None or coming.planned.skipped else coming.local_tokens,
            )
        if spans is not None:
            self._record_pipeline(step, spans)
        self.pending.append(PendingStep(data, lr, metrics))
        return coming

    def _record_pipeline(self, step: int, spans: Sequence[Span]) -> None:
        """Report when the ranks of the first pipeline did what, in the time of day: the one clock that hosts share."""
        place, since = self.context.coordinates, time.time() - time.perf_counter()
        first = all(place[axis] == 0 for axis in place if axis != "pp")
        mine = [(str(action), start + since, end + since) for action, start, end in spans] if first else []
        everyone = self.context.gather_json(mine)
        of_pipeline = [everyone[rank] for rank in self.context.members("pp-forward")]
        self.log.pipeline(step, str(self.config.parallel.schedule), of_pipeline)

    def _read(self, *, keep: int) -> None:
        """Read the figures of all launched steps but the newest `keep`."""
        while len(self.pending) > keep:
            data, lr, pending = self.pending.popleft()
            if pending is not None:
                self._account(data, lr, pending.read(), pending.lap.read())
            else:
                self.job.progress.consume(data.planned)
                self._pass_over("skipped_on_request")

    def _account(self, data: StepBatches, lr: float, metrics: StepMetrics, time_split: dict[StepPart, float]) -> None:
        """What a step means for the run."""
        progress, train = self.job.progress, self.config.train
        if not self.under_way:
            self.context.set_timeout(after_report_s(self.config.parallel.timeout_s))
            self.under_way = True
        if metrics.refused:
            agree(self.context, self.problems)
        self.stopping = self.stopping or metrics.stop
        progress.consume(data.planned)
        if metrics.batch_tokens == 0:  # neither applied nor bad
            progress.empty_steps += 1
            self._pass_over("empty")
            return
        progress.bad_steps += metrics.skipped
        if not metrics.skipped:
            progress.bad_steps_in_a_row = 0
            progress.tokens += metrics.batch_tokens
            progress.last_applied = progress.step
        elif (metrics.loss_scale or 0.0) <= self.config.optimizer.min_loss_scale:  # else fp16 looks for its loss scale
            progress.bad_steps_in_a_row += 1
        metrics.step, metrics.tokens, metrics.lr = progress.step, progress.tokens, lr
        metrics.bad_steps = progress.bad_steps
        self.meter.add(metrics, data, time_split)
        if metrics.skipped:
            found = {name: getattr(metrics, name) for name in ("loss", "grad_norm", "loss_scale")}
            self.log.event("skipped", progress.step, **found)
        if progress.step % train.log_interval == 0 or progress.step == train.steps:
            self._record()
        if (count := progress.bad_steps_in_a_row) >= train.max_bad_steps:
            raise TrainingStoppedError(
                f"loss or gradient was not finite in {several(count, 'step')} in a row (now step {progress.step}: loss "
                f"{metrics.loss}, gradient norm {metrics.grad_norm}); none of them was applied. {self.saver.advise()}; "
                "train.max_bad_steps sets the patience."
            )

    def _record(self) -> None:
        if (metrics := self.meter.measured()) is not None:
            self.log.add(metrics.to_json())

    def _pass_over(self, kind: str) -> None:
        """The newest step has no figures."""
        step = self.job.progress.step
        if step == self.config.train.steps:  # it gets no record: those before it do
            self._record()
        self.log.event(kind, step)

    # --- between steps -----------------------------------------------------------------------------------------------

    def _after(self, step: int) -> None:
        """Whatever is due after `step`; reading the figures first where something is."""
        self.saver.report()
        train = self.config.train
        evaluate = self.job.evaluates(step)
        check = train.check_replicas_every > 0 and step % train.check_replicas_every == 0
        sample = train.sample_interval > 0 and step % train.sample_interval == 0
        pause = evaluate or sample or self.saver.due(step) or self.profile is not None
        if pause or check:
            self._read(keep=0)
        if check:
            check_replicas(self.job.training, self.context, step)
        if evaluate:
            self._evaluate(step)
        if sample:
            self._sample(step)
        if self.profile is not None:
            self._keep_profile(step, self.profile)
            self.profile = None
        if self.saver.due(step):
            self.saver.save()
        if pause or step % (RANKS_EVERY * train.log_interval) == 0:
            self._gather_rank_figures(step)
        if pause:
            gc.collect()  # collection is off between these points: it would pause ranks at different times
            self.job.training.clock.restart()

    def _keep_profile(self, step: int, profile: profile) -> None:
        folder = self.job.folder.path / PROFILES
        try:
            split = write_profile(folder, step, self.context.rank, chrome_trace(profile))
        except (OSError, ValueError) as error:  # an incomplete trace is no JSON
            self.log.note(f"warning: the profile of step {step} could not be kept: {type(error).__name__}: {error}")
        else:
            self.log.event("profile", step, folder=str(folder), **split)

    def go_on(self) -> bool:
        """Whether no rank was asked to stop; collective, one small all-reduce on the host."""
        asked = [True] if self.stop.requested is not None else []
        self.stopping = self.stopping or any(self.context.gather_json(asked))
        return not self.stopping

    def doing(self) -> Doing:
        """For the watchdog."""
        if self.saver.busy:
            return Doing("save", "in a save", SAVES)
        part, executor = self.job.training.clock.part, self.job.training.executor
        words = f"step {self.newest_step}, {part}, pass {executor.at or 'none yet'}"
        return Doing((self.newest_step, self.evaluated_step, part, executor.performed), words)

    def patience(self) -> Patience:
        """How long nothing may go on."""
        name = "timeout_s" if self.under_way else "startup_timeout_s"
        return Patience(f"parallel.{name}", getattr(self.config.parallel, name))

    def complete(self) -> bool:
        """Whether nothing of the run remains to be done."""
        return self.job.progress.step >= self.config.train.steps and not self._owes_evaluation()

    def finish(self, *, stopped: bool) -> None:
        """After the last step: the figures of all ranks, and a sample of text of a run that was not stopped."""
        step = self.job.progress.step
        self._gather_rank_figures(step)
        if stopped or self.sampled_step == step:
            return
        try:
            self._sample(step)
        except Exception as error:  # the run is trained and saved: it does not fail here
            self.log.note(f"no sample of text: {type(error).__name__}: {error}")

    def _owes_evaluation(self) -> bool:
        step = self.job.progress.step
        return self.job.evaluates(step) and self.evaluated_step != step

    def _evaluate(self, step: int) -> None:
        job, context = self.job, self.context
        assert job.data.validation is not None
        begin = time.perf_counter()
        share = data_share(self.config, context)
        batches = validation_batches(job.data.validation, self.config, **share, device=context.device)
        figures = evaluate(job.training, context, batches, job.data.bytes_of_ids, self.go_on)
        if figures is None:
            self._broken_off("evaluation", step)
            return
        self.evaluated_step = step
        seconds, tokens = time.perf_counter() - begin, job.progress.tokens
        self.log.add(
            {
                "step": step,
                "tokens": tokens,
                "val_loss": figures.loss,
                "val_perplexity": figures.perplexity,
                "val_bits_per_byte": figures.bits_per_byte,
                "eval_time_s": seconds,
            }
        )

    def _sample(self, step: int) -> None:
        """Text from the model after a step. All ranks call it; each model writes the same, so that ranks stay together
        when a stop ends it."""
        job, train = self.job, self.config.train
        if not job.prompts:
            return
        assert job.data.tokenizer is not None, "prompts were encoded"
        self.sampled_step = step
        following = sample(
            job.training,
            self.context,
            [prompt.tokens for prompt in job.prompts],
            train.sample_tokens,
            seq_length=train.seq_length,
            seed=self.config.seed,
            rows=train.micro_batch_size if train.compile else None,
            go_on=self.go_on,
        )
        if any(len(text) < train.sample_tokens for text in following):
            self._broken_off("sample of text", step)
            return
        for prompt, tokens in zip(job.prompts, following, strict=True):
            self.log.event("sample", step, prompt=prompt.text, text=job.data.tokenizer.decode(tokens))

    def _broken_off(self, what: str, step: int) -> None:
        self.log.note(f"asked to stop: the {what} after step {step} is broken off, nothing of it is recorded")

    def _gather_rank_figures(self, step: int) -> None:
        if step == self.gathered_step:
            return
        self.gathered_step = step
        memory, compute, slow = self.meter.gather()
        self.log.event("ranks", step, memory_gib=memory, compute_s=compute)
        for rank, (times, share) in slow.items():
            self.log.event(
                "straggler", step, rank=rank, times=round(times, 2), share=round(share, 3), host=self.hosts[rank]
            )

"""The training loop.

For each step: the next microbatches, one optimizer step, and what is due after it: a record of its figures, a check of
the replicas, an evaluation, a sample of text, a checkpoint. A step of train.skip_steps only consumes its samples. A
stop signal ends the run after the step in which all ranks learn of it, saved. An evaluation or a sample of text ends at
its next batch or token, and the next start makes up for the evaluation.
"""

import gc
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, takewhile

from megalite.config.step_plan import planned_steps
from megalite.data.batches import StepBatches, TrainBatches, validation_batches
from megalite.errors.problems import Problem, UserError
from megalite.launch.signals import StopRequest
from megalite.optim.schedule import learning_rate
from megalite.train.evaluate import agreed_batches, evaluate
from megalite.train.figures import RunFigures
from megalite.train.job import Job
from megalite.train.pipeline_times import write_times
from megalite.train.profile import StepProfiler
from megalite.train.recorder import BadStep, EvaluationRecord, Recorder
from megalite.train.replicas import check_replicas
from megalite.train.sample import sample
from megalite.train.saving import Saver, TrainingStoppedError
from megalite.train.step import LaunchedStep, StepFigures, TrainStep

RANKS_EVERY = 50  # records between two moments at which ranks gather what each of them takes, at most


@dataclass(frozen=True)
class Launched:
    """A step whose figures have not been read yet."""

    data: StepBatches
    lr: float = 0.0
    step: LaunchedStep | None = None  # None: it is passed over


class Loop:
    """Runs the steps of one job."""

    def __init__(self, job: Job, recorder: Recorder, saver: Saver, stop: StopRequest) -> None:
        self.job, self.config, self.context = job, job.config, job.context
        self.recorder = recorder
        self.saver = saver
        self.stop = stop
        self.step = TrainStep(job.training, job.config.optimizer, job.context)
        self.figures = RunFigures(job)
        self.profiler = StepProfiler(job.config.train.profile_steps, job.training.clock, job.context.device)
        # An accelerator runs ahead of the host: its figures are read one step late. A CPU's are there at once.
        self.lateness = 0 if job.context.device.type == "cpu" else 1
        self.launched: deque[Launched] = deque()
        self.coming: StepBatches | None = None  # the data of the next step
        self.problems: list[Problem] = []  # of the input that this rank has read: from then on no step is applied
        self.under_way = False  # the first step is done: from now on no rank is late for a good reason
        self.stopping = False
        self.evaluated_step = job.progress.step if job.evaluated else -1
        self.sampled_step = -1
        self.gathered_step = -1  # the newest after which ranks gathered their figures

    def run(self) -> None:
        """All remaining steps, or as many as pass until a stop is asked for; leaves the last state saved."""
        job, train = self.job, self.config.train
        plan = planned_steps(train, done=job.progress.step, samples=job.progress.samples)
        batches = TrainBatches(
            job.data.train,
            self.config,
            takewhile(lambda planned: planned.step <= train.steps, plan),
            dp_rank=self.context.index("dp"),
            dp_size=self.context.size("dp"),
            device=self.context.device,
        )
        try:
            if job.resumed_from is not None and self._owes_evaluation(job.progress.step):
                self._evaluate(job.progress.step)
            self.figures.restart_clock()
            self.coming = self._fetch(batches)
            while (data := self.coming) is not None and not self.stopping:
                self._launch(data, batches)
                self._read(keep=self.lateness)
                self._after(data.planned.step)
            self._read(keep=0)
        except UserError:  # all ranks refuse the input that one of them has read: what was learned is kept
            if job.progress.step > 0:
                self.saver.save_last()
            raise
        finally:
            batches.close()
        job.training.gather.finish()
        self.saver.save_last()

    # --- one step ----------------------------------------------------------------------------------------------------

    def _fetch(self, batches: TrainBatches) -> StepBatches | None:
        """The data of the next step, None after the last."""
        with self.job.training.clock.within("data"):
            return next(batches, None)

    def _launch(self, data: StepBatches, batches: TrainBatches) -> None:
        """Launch the step and fetch the data of the next one."""
        if data.planned.skipped:
            self.launched.append(Launched(data))
            self.coming = self._fetch(batches)
        elif self.profiler.due(data.planned.step):
            self._read(keep=0)
            with self.profiler.recording():
                self.figures.restart_clock()
                self._train(data, batches)
                self._read(keep=0)  # here: its time ends before the profiler's work begins
        else:
            self._train(data, batches)

    def _train(self, data: StepBatches, batches: TrainBatches) -> None:
        step, stop = data.planned.step, self.stop.requested is not None
        lr = learning_rate(step - 1, self.config.lr, peak=self.config.optimizer.lr, steps=self.config.train.steps)
        self.coming = coming = self._fetch(batches)
        self.problems = self.problems or data.problems
        with self._pipeline_recorded(step):
            launched = self.step(
                data.microbatches,
                data.local_tokens,
                lr,
                stop=stop,
                refused=bool(self.problems),
                next_local_tokens=None if coming is None or coming.planned.skipped else coming.local_tokens,
            )
        self.launched.append(Launched(data, lr, launched))

    @contextmanager
    def _pipeline_recorded(self, step: int) -> Iterator[None]:
        """The pipeline's times of every train.record_pipeline-th step."""
        every, schedule = self.config.train.record_pipeline, self.config.parallel.schedule
        if every == 0 or step % every:
            yield
            return
        with self.job.training.executor.recording() as spans:
            yield
        assert schedule is not None, "derive() fills it in"
        try:
            write_times(self.job.folder.path, step, schedule, spans, self.context)
        except OSError as error:  # of rank 0, after all that ranks do together
            self.recorder.note(f"warning: the pipeline's times of step {step} cannot be written: {error.strerror}")

    def _read(self, *, keep: int) -> None:
        """Read the figures of all launched steps but the newest `keep`."""
        while len(self.launched) > keep:
            launched = self.launched.popleft()
            if launched.step is None:
                self.job.progress.consume(launched.data.planned)
                self._passed_over("skipped_on_request", "it is one of train.skip_steps")
            else:
                self._account(launched, launched.step.read(), launched.step)

    def _account(self, launched: Launched, figures: StepFigures, step: LaunchedStep) -> None:
        """What a step means for the run."""
        progress, train = self.job.progress, self.config.train
        if not self.under_way:
            self.context.set_timeout(self.config.parallel.timeout_s)
            self.under_way = True
        if figures.refused:
            self.context.agree(self.problems)
        self.stopping = self.stopping or figures.stop
        progress.consume(launched.data.planned)
        if figures.tokens == 0:  # neither applied nor bad
            progress.empty_steps += 1
            self._passed_over("empty", "no token of its batch enters the loss")
            return
        progress.bad_steps += figures.skipped
        progress.bad_steps_in_a_row = self._bad_steps_in_a_row(figures)
        if not figures.skipped:
            progress.tokens += figures.tokens
            progress.last_applied = progress.step
        self.figures.add(launched.data, figures, launched.lr, step.lap.read())
        if figures.skipped:
            scale = None if self.job.training.loss_scale is None else figures.loss_scale
            bad = BadStep(progress.step, figures.loss, figures.grad_norm, scale, progress.bad_steps)
            self.recorder.bad_step(bad)
        if progress.step % train.log_interval == 0 or progress.step == train.steps:
            self._record()
        if progress.bad_steps_in_a_row >= train.max_bad_steps:
            self._give_up(figures)

    def _record(self) -> None:
        if (record := self.figures.record()) is not None:
            self.recorder.step(record)

    def _passed_over(self, kind: str, why: str) -> None:
        """The newest step has no figures."""
        step = self.job.progress.step
        if step == self.config.train.steps:  # it gets no record: those before it do
            self._record()
        self.recorder.passed_over(step, kind, why)
        self.figures.pass_over()

    def _bad_steps_in_a_row(self, figures: StepFigures) -> int:
        """While fp16 looks for its loss scale it skips steps on purpose: they count once the scale is at its least."""
        before = self.job.progress.bad_steps_in_a_row
        if not figures.skipped:
            return 0
        least = self.config.optimizer.min_loss_scale
        falling = self.job.training.loss_scale is not None and figures.loss_scale > least
        return before if falling else before + 1

    def _give_up(self, figures: StepFigures) -> None:
        count = self.job.progress.bad_steps_in_a_row
        raise TrainingStoppedError(
            f"loss or gradient was not finite in {count} steps in a row (now step {self.job.progress.step}: loss "
            f"{figures.loss}, gradient norm {figures.grad_norm}); none of them was applied. {self.saver.what_now()}; "
            "train.max_bad_steps sets the patience."
        )

    # --- between steps -----------------------------------------------------------------------------------------------

    def _after(self, step: int) -> None:
        """Whatever is due after `step`; reading the figures first where something is."""
        self.saver.report()
        train = self.config.train
        evaluate = self.job.evaluates(step)
        check = train.check_replicas_every > 0 and step % train.check_replicas_every == 0
        sample = train.sample_interval > 0 and step % train.sample_interval == 0
        pause = evaluate or sample or self.saver.due(step) or self.profiler.due(step)
        if pause or check:
            self._read(keep=0)
        if check:
            check_replicas(self.job.training, self.context, step)
        if evaluate:
            self._evaluate(step)
        if sample:
            self._sample(step)
        if self.profiler.due(step):
            self.profiler.report(step, self.recorder)
        if self.saver.due(step):
            self.saver.save()
        if pause or step % (RANKS_EVERY * train.log_interval) == 0:
            self._gather_rank_figures(step)
        if pause:
            gc.collect()  # collection is off between these points: it would pause ranks at different times
            self.figures.restart_clock()

    def go_on(self) -> bool:
        """Whether no rank was asked to stop; collective, one small all-reduce on the host."""
        asked = [True] if self.stop.requested is not None else []
        self.stopping = self.stopping or any(self.context.gather_json(asked))
        return not self.stopping

    def complete(self) -> bool:
        """Whether nothing of the run remains to be done."""
        step = self.job.progress.step
        return step >= self.config.train.steps and not self._owes_evaluation(step)

    def finish(self, *, stopped: bool) -> None:
        """After the last step: the figures of all ranks, and a sample of text of a run that was not stopped."""
        step = self.job.progress.step
        self._gather_rank_figures(step)
        if stopped or self.sampled_step == step:
            return
        try:
            self._sample(step)
        except Exception as error:  # the run is trained and saved: it does not fail here
            self.recorder.note(f"no sample of text: {type(error).__name__}: {error}")

    def _owes_evaluation(self, step: int) -> bool:
        return self.job.evaluates(step) and self.evaluated_step != step

    def _evaluate(self, step: int) -> None:
        job, context = self.job, self.context
        assert job.data.validation is not None
        begin = time.perf_counter()
        batches = validation_batches(
            job.data.validation,
            self.config,
            dp_rank=context.index("dp"),
            dp_size=context.size("dp"),
            device=context.device,
        )
        known_to_all = agreed_batches(context, batches)
        wanted = chain(islice(known_to_all, 1), takewhile(lambda _: self.go_on(), known_to_all))
        figures = evaluate(job.training, context, wanted, job.data.bytes_of_ids) if self.go_on() else None
        if figures is None or self.stopping:
            self.recorder.interrupted("evaluation", step)
            return
        self.evaluated_step = step
        seconds, tokens = time.perf_counter() - begin, job.progress.tokens
        record = EvaluationRecord(step, tokens, figures.loss, figures.perplexity, figures.bits_per_byte, seconds)
        self.recorder.evaluated(record)

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
            self.recorder.interrupted("sample of text", step)
            return
        texts = map(job.data.tokenizer.decode, following)
        self.recorder.sampled(step, [(prompt.text, text) for prompt, text in zip(job.prompts, texts, strict=True)])

    def _gather_rank_figures(self, step: int) -> None:
        if step != self.gathered_step:
            self.gathered_step = step
            self.recorder.ranks(step, self.figures.gather())

"""Records and shows a run: its files and trackers (chronicle.py), the terminal, and this rank's log.

Only rank 0 writes files and the terminal. Every rank keeps its own log.
"""

import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from megalite.checkpoint.store import CheckpointError, Saved
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.launch.environment import launch_command, read_environment
from megalite.observe import trackers
from megalite.observe.about import resolved, start_fields
from megalite.observe.chronicle import Chronicle
from megalite.observe.log import open_log
from megalite.observe.terminal import Terminal
from megalite.observe.trace import FOLDER, format_split, write_profile
from megalite.observe.views import HeaderView, Summary
from megalite.train.history import read_metrics
from megalite.train.job import Job
from megalite.train.recorder import BadStep, EvaluationRecord, RankFigures, Sample, StepRecord

GIB = 1 << 30


class RunRecorder:
    """The recorder of one rank (megalite/train/recorder.py says when each method is called)."""

    _job: Job
    _log: logging.Logger

    def __init__(self, context: ParallelContext) -> None:
        self._terminal = Terminal(sys.stdout, interactive=sys.stdout.isatty(), enabled=context.rank == 0)
        self._chronicle: Chronicle | None = None
        self._began = time.perf_counter()
        self._hosts: list[str] = []  # by rank
        self._known_slow: set[int] = set()  # ranks that the terminal has named
        self._samples: tuple[int, Sequence[Sample]] = (-1, [])  # the newest, and after which step
        self.note, self.preparing = self._terminal.note, self._terminal.preparing

    # --- the run as a whole ------------------------------------------------------------------------------------------

    def open(self, job: Job) -> None:
        self._job, folder = job, job.folder.path
        self._log = open_log(folder, job.context)
        if job.context.rank == 0:
            opened = trackers.open_trackers(job.config, folder, job.progress.step, self.note)
            self._chronicle = Chronicle(job, self.note, opened)
        self._began = time.perf_counter()

    def run_started(self, hosts: list[str]) -> None:
        job, train = self._job, self._job.config.train
        self._hosts = hosts
        title = f"{job.config.model.name} on {job.config.data.source}"
        self._terminal.header(HeaderView(title, resolved(job), train.steps, job.progress.step))
        if train.sample_interval > 0 and train.sample_tokens > 0 and not job.prompts:
            self.note("no samples of text: the tokenizer of these tokens is not known")
        self._log.info("%s: training from step %d to %d", job.config.run_name, job.progress.step, train.steps)
        kind = "start" if job.resumed_from is None else "resume"
        if self._chronicle is not None:
            self._event(kind, job.progress.step, **start_fields(job, hosts))

    def failed(self, error: Exception, *, taken_over: bool = False) -> None:
        step = self._job.progress.step
        self._log.error("failed at step %d\n%s", step + 1, "".join(traceback.format_exception(error)))
        if self._chronicle is not None and not taken_over:
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._chronicle.end("failed", step, status=2 if isinstance(error, UserError) else 1, message=message)

    def finished(self, status: int, stopped_by: str | None) -> None:
        step = self._job.progress.step
        self._log.info("ended at step %d%s", step, f" ({stopped_by})" if stopped_by else "")
        if self._chronicle is None:
            return
        if stopped_by is None:
            self._chronicle.end("finished", step, status=status)
        else:
            self._chronicle.end("stopped", step, status=status, by=stopped_by)
        self._terminal.finish(self._summary(self._chronicle, stopped_by))

    def close(self) -> None:
        if self._chronicle is not None:
            self._chronicle.close()
        self._terminal.close()

    def _summary(self, chronicle: Chronicle, stopped_by: str | None) -> Summary:
        job, records = self._job, read_metrics(chronicle.metrics_path)
        evaluations = [record for record in records if "val_loss" in record]
        last: dict[str, Any] = evaluations[-1] if evaluations else {}
        newest, (sampled_step, samples) = chronicle.run.last, self._samples
        return Summary(
            step=job.progress.step,
            steps=job.config.train.steps,
            tokens=job.progress.tokens,
            seconds=time.perf_counter() - self._began,
            tokens_per_s=newest.get("mean_tokens_per_s", 0.0),
            newest_tokens_per_s=newest.get("tokens_per_s", 0.0),
            run_dir=str(job.folder.path),
            train_curve=[(record["step"], record["loss"]) for record in records if "loss" in record],
            validation_curve=[(record["step"], record["val_loss"]) for record in evaluations],
            perplexity=last.get("val_perplexity"),
            bits_per_byte=last.get("val_bits_per_byte"),
            bad_steps=job.progress.bad_steps,
            samples=list(samples) if stopped_by is None and sampled_step == job.progress.step else [],
            stopped_by=stopped_by,
            command=launch_command(read_environment(os.environ), sys.argv),
        )

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, record: StepRecord) -> None:
        self._terminal.step(record)
        left_out = ("steps", *(["loss_scale"] if record.loss_scale is None else []))
        self._record({name: value for name, value in vars(record).items() if name not in left_out})

    def bad_step(self, bad: BadStep) -> None:
        self._log.warning("step %d skipped: loss %s, norm %s", bad.step, bad.loss, bad.grad_norm)
        where = "" if bad.loss_scale is None else f" at a loss scale of {bad.loss_scale:g}"
        self.note(
            f"step {bad.step}: loss or gradient is not finite{where}, the step is not applied ({bad.count} in all)"
        )
        found = {"loss": bad.loss, "grad_norm": bad.grad_norm}
        self._event("skipped", bad.step, **found, loss_scale=bad.loss_scale)

    def passed_over(self, step: int, kind: str, why: str) -> None:
        self._log.info("step %d passed over: %s", step, why)
        self.note(f"step {step}: passed over, {why}")
        self._event(kind, step)

    def profiled(self, step: int, trace: bytes) -> None:
        run_dir = self._job.folder.path
        try:
            split = write_profile(run_dir, step, self._job.context.rank, trace)
        except (OSError, ValueError) as error:  # an incomplete trace is no JSON
            self.not_profiled(step, f"{type(error).__name__}: {error}")
            return
        folder = run_dir / FOLDER
        self._log.info("step %d profiled into %s\n%s", step, folder, format_split(split))
        self.note(f"step {step}: profiled into {folder}")
        self._event("profile", step, folder=str(folder), wall_s=split.wall_s, parts=split.parts, inside=split.inside)

    def not_profiled(self, step: int, why: str) -> None:
        self._log.error("the profile of step %d could not be kept: %s", step, why)
        self.note(f"warning: the profile of step {step} could not be kept: {why}")

    # --- between steps -----------------------------------------------------------------------------------------------

    def evaluated(self, record: EvaluationRecord) -> None:
        self._terminal.evaluation(record)
        self._record(
            {
                "step": record.step,
                "tokens": record.tokens,
                "val_loss": record.loss,
                "val_perplexity": record.perplexity,
                "val_bits_per_byte": record.bits_per_byte,
                "eval_time_s": record.seconds,
            }
        )
        self._log.info("step %d validation loss %.6f", record.step, record.loss)

    def interrupted(self, what: str, step: int) -> None:
        self._log.info("asked to stop: the %s after step %d is broken off", what, step)
        self.note(f"asked to stop: the {what} after step {step} is broken off, nothing of it is recorded")

    def saved(self, saved: Saved) -> None:
        took = f"{saved.bytes / GIB:.3f} GiB in {saved.seconds:.2f} s, training held up for {saved.stall_s:.3f} s"
        self._log.info("saved %s: %s", saved.path.name, took)
        times = {"seconds": round(saved.seconds, 3), "stall_s": round(saved.stall_s, 3)}
        self._event("checkpoint", int(saved.path.name.rpartition("-")[2]), bytes=saved.bytes, **times)

    def not_saved(self, error: CheckpointError) -> None:
        self._log.error("%s", error)
        self.note(f"warning: {error}")
        self._event("checkpoint_failed", self._job.progress.step, message=str(error))

    def ranks(self, step: int, figures: RankFigures) -> None:
        self._event("ranks", step, memory_gib=figures.memory_gib, compute_s=figures.compute_s)
        for slow in figures.stragglers:
            host = self._hosts[slow.rank]
            self._event("straggler", step, rank=slow.rank, host=host, times=round(slow.times, 2))
            if slow.rank not in self._known_slow:
                self.note(
                    f"rank {slow.rank} on {host} computes {slow.times:.1f} times as long as others with the same work "
                    f"(step {step})"
                )
        self._known_slow |= {slow.rank for slow in figures.stragglers}

    def sampled(self, step: int, samples: Sequence[Sample]) -> None:
        self._samples = step, samples
        for prompt, text in samples:
            if self._chronicle is not None:
                self._log.info("sample after step %d: %s%s", step, prompt, text)
                self._chronicle.sample(step, prompt, text)
            if step < self._job.config.train.steps:  # else the summary shows it
                self._terminal.sample(step, prompt, text)

    # --- records -----------------------------------------------------------------------------------------------------

    def _record(self, line: dict[str, Any]) -> None:
        if self._chronicle is not None:
            self._chronicle.record(line)

    def _event(self, kind: str, step: int, **fields: Any) -> None:
        if self._chronicle is not None:
            self._chronicle.event(kind, step, **fields)

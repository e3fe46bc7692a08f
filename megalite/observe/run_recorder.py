"""Records and shows a run: its files and trackers (chronicle.py), the terminal, and this rank's log.

Only rank 0 writes files and the terminal. Every rank keeps its own log.
"""

import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from megalite.checkpoint.store import CheckpointError, Saved
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.observe.about import start_fields
from megalite.observe.chronicle import Chronicle
from megalite.observe.log import open_log
from megalite.observe.terminal import Terminal
from megalite.observe.trace import FOLDER, format_split, write_profile
from megalite.train.job import Job
from megalite.train.recorder import BadStep, EvaluationRecord, RankFigures, Sample, StepRecord, TimedAction

GIB = 1 << 30


class RunRecorder:
    """The recorder of one rank (megalite/train/recorder.py says when each method is called)."""

    _job: Job

    def __init__(self, context: ParallelContext) -> None:
        self._terminal = Terminal(sys.stdout, interactive=sys.stdout.isatty(), enabled=context.rank == 0)
        self._chronicle: Chronicle | None = None
        self._log = logging.Logger("before the run folder is known", level=logging.CRITICAL)
        self._began = time.perf_counter()
        self._hosts: list[str] = []  # by rank
        self._known_slow: set[int] = set()  # ranks that the terminal has named
        self.preparing = self._terminal.preparing

    def note(self, text: str) -> None:
        self._log.info("%s", text)
        self._terminal.note(text)

    # --- the run as a whole ------------------------------------------------------------------------------------------

    def open(self, job: Job) -> None:
        self._job = job
        self._log = open_log(job.folder.path, job.context)
        if job.context.rank == 0:
            self._chronicle = Chronicle(job, self.note)
        self._began = time.perf_counter()

    def run_started(self, hosts: list[str]) -> None:
        job, train = self._job, self._job.config.train
        self._hosts, first = hosts, job.progress.step
        self._log.info("%s: training from step %d to %d", job.config.run_name, first, train.steps)
        if self._chronicle is None:  # only rank 0 asks git and the packages for their versions
            return
        about = start_fields(job, hosts)
        title = f"{job.config.model.name} on {job.config.data.source}"
        self._terminal.header(title, about["about"], first_step=first, steps=train.steps)
        if train.sample_interval > 0 and train.sample_tokens > 0 and not job.prompts:
            self.note("no samples of text: the tokenizer of these tokens is not known")
        self._event("start" if job.resumed_from is None else "resume", first, **about)

    def failed(self, error: Exception, *, taken_over: bool = False) -> None:
        step = self._job.progress.step
        self._log.error("failed at step %d\n%s", step + 1, "".join(traceback.format_exception(error)))
        if self._chronicle is not None and not taken_over:
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._chronicle.end("failed", step, status=2 if isinstance(error, UserError) else 1, message=message)

    def finished(self, status: int, stopped_by: str | None) -> None:
        step, seconds = self._job.progress.step, time.perf_counter() - self._began
        kind, by = ("finished", {}) if stopped_by is None else ("stopped", {"by": stopped_by})
        self._log.info("%s at step %d %s", kind, step, stopped_by or "")
        if self._chronicle is not None:
            self._chronicle.end(kind, step, status=status, **by)
            tokens = self._job.progress.tokens
            self._terminal.finish(self._chronicle.run, tokens=tokens, seconds=seconds, stopped_by=stopped_by)

    def close(self) -> None:
        if self._chronicle is not None:
            self._chronicle.close()
        self._terminal.close()

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, record: StepRecord) -> None:
        self._terminal.step(record)
        left_out = ("steps", *(["loss_scale"] if record.loss_scale is None else []))
        self._add({name: value for name, value in vars(record).items() if name not in left_out})

    def bad_step(self, bad: BadStep) -> None:
        found = {"loss": bad.loss, "grad_norm": bad.grad_norm, "loss_scale": bad.loss_scale}
        self._log.warning("step %d: %s", bad.step, found)
        at = "" if bad.loss_scale is None else f" at a loss scale of {bad.loss_scale:g}"
        self.note(f"step {bad.step}: loss or gradient is not finite{at}, the step is not applied ({bad.count} in all)")
        self._event("skipped", bad.step, **found)

    def passed_over(self, step: int, kind: str, why: str) -> None:
        self.note(f"step {step}: passed over, {why}")
        self._event(kind, step)

    def profiled(self, step: int, trace: Callable[[], bytes]) -> None:
        folder = self._job.folder.path / FOLDER
        try:
            split = write_profile(folder, step, self._job.context.rank, trace())
        except (OSError, ValueError) as error:  # an incomplete trace is no JSON
            self.note(f"warning: the profile of step {step} could not be kept: {type(error).__name__}: {error}")
            return
        self.note(f"step {step}: profiled into {folder}")
        self._log.info("step %d\n%s", step, format_split(split))
        self._event("profile", step, folder=str(folder), **split)

    def pipeline(self, step: int, ranks: Sequence[Sequence[TimedAction]]) -> None:
        if self._chronicle is not None:
            self._chronicle.pipeline(step, str(self._job.config.parallel.schedule), ranks)

    # --- between steps -----------------------------------------------------------------------------------------------

    def evaluated(self, record: EvaluationRecord) -> None:
        self._terminal.evaluation(record)
        self._add({**vars(record)})
        self._log.info("step %d validation loss %.6f", record.step, record.val_loss)

    def interrupted(self, what: str, step: int) -> None:
        self.note(f"asked to stop: the {what} after step {step} is broken off, nothing of it is recorded")

    def saved(self, saved: Saved) -> None:
        took = f"{saved.bytes / GIB:.3f} GiB in {saved.seconds:.2f} s, training held up for {saved.stall_s:.3f} s"
        self._log.info("saved %s: %s", saved.path.name, took)
        times = {"seconds": round(saved.seconds, 3), "stall_s": round(saved.stall_s, 3)}
        self._event("checkpoint", int(saved.path.name.rpartition("-")[2]), bytes=saved.bytes, **times)

    def not_saved(self, error: CheckpointError) -> None:
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
        for prompt, text in samples:
            if self._chronicle is not None:
                self._log.info("sample after step %d: %s%s", step, prompt, text)
            self._event("sample", step, prompt=prompt, text=text)
            if step < self._job.config.train.steps:  # else the summary shows it
                self._terminal.sample(step, prompt, text)

    # --- records -----------------------------------------------------------------------------------------------------

    def _add(self, line: dict[str, Any]) -> None:
        if self._chronicle is not None:
            self._chronicle.add(line)

    def _event(self, kind: str, step: int, **fields: Any) -> None:
        if self._chronicle is not None:
            self._chronicle.event(kind, step, **fields)

"""Records and shows a run: its files and trackers (chronicle.py), the terminal, and this rank's log.

Only rank 0 writes files and the terminal. Every rank keeps its own log.
"""

import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.observe.about import start_fields
from megalite.observe.chronicle import Chronicle
from megalite.observe.event_words import words_of
from megalite.observe.log import open_log
from megalite.observe.terminal import Terminal
from megalite.observe.trace import FOLDER, write_profile
from megalite.train.job import Job
from megalite.train.recorder import EvaluationRecord, StepRecord, TimedAction

NOTED = ("skipped", "skipped_on_request", "empty", "straggler", "profile")  # kinds of events


class RunRecorder:
    """The recorder of one rank (megalite/train/recorder.py says when each method is called)."""

    _job: Job

    def __init__(self, context: ParallelContext) -> None:
        self._terminal = Terminal(sys.stdout, interactive=sys.stdout.isatty(), enabled=context.rank == 0)
        self._chronicle: Chronicle | None = None
        self._log = logging.Logger("before the run folder is known", level=logging.CRITICAL)
        self._early: list[str] = []  # notes until then
        self._began = time.perf_counter()
        self._hosts: list[str] = []  # by rank
        self._known_slow: set[int] = set()  # ranks that the terminal has named
        self.preparing = self._terminal.preparing

    def note(self, text: str) -> None:
        if not self._log.isEnabledFor(logging.INFO):
            self._early.append(text)
        self._log.info("%s", text)
        self._terminal.note(text)

    # --- the run as a whole ------------------------------------------------------------------------------------------

    def open(self, job: Job) -> None:
        self._job = job
        self._log = open_log(job.folder.path, job.context)
        for text in self._early:
            self._log.info("%s", text)
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
        self.event("start" if job.resumed_from is None else "resume", first, **about)

    def seals(self) -> dict[str, dict[str, Any]]:
        return {} if self._chronicle is None else self._chronicle.seals()

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

    # --- what happens ------------------------------------------------------------------------------------------------

    def step(self, record: StepRecord) -> None:
        self._terminal.step(record)
        line = {name: value for name, value in vars(record).items() if name != "steps"}
        for name in ("loss_scale", "cuts", "moe"):  # not of this kind of run
            if line[name] is None:
                del line[name]
        if self._chronicle is not None:
            self._chronicle.add(line)

    def evaluated(self, record: EvaluationRecord) -> None:
        self._terminal.evaluation(record)
        self._log.info("step %d validation loss %.6f", record.step, record.val_loss)
        if self._chronicle is not None:
            self._chronicle.add({**vars(record)})

    def event(self, kind: str, step: int, **fields: Any) -> None:
        if kind == "straggler":
            fields["host"] = self._hosts[fields["rank"]]
        words = words_of({"kind": kind, **fields})
        if kind == "checkpoint":
            self._log.info("saved step-%08d: %s", step, words)
        elif kind == "checkpoint_failed":
            self.note(f"warning: {words}")
        elif kind == "sample" and self._chronicle is not None:
            self._log.info("sample after step %d: %s%s", step, fields["prompt"], fields["text"])
            if step < self._job.config.train.steps:  # else the summary shows it
                self._terminal.sample(step, fields["prompt"], fields["text"])
        elif kind in NOTED and fields.get("rank") not in self._known_slow:
            self.note(f"step {step}: {words}")
        self._known_slow |= {fields["rank"]} if kind == "straggler" else set()
        if self._chronicle is not None:
            self._chronicle.event(kind, step, **fields)

    def profiled(self, step: int, trace: Callable[[], bytes]) -> None:
        folder = self._job.folder.path / FOLDER
        try:
            split = write_profile(folder, step, self._job.context.rank, trace())
        except (OSError, ValueError) as error:  # an incomplete trace is no JSON
            self.note(f"warning: the profile of step {step} could not be kept: {type(error).__name__}: {error}")
        else:
            self.event("profile", step, folder=str(folder), **split)

    def pipeline(self, step: int, ranks: Sequence[Sequence[TimedAction]]) -> None:
        if self._chronicle is not None:
            self._chronicle.pipeline(step, str(self._job.config.parallel.schedule), ranks)

"""The views of a run on rank 0 (train/run_log.py, View): the report, the trackers, and last the terminal, so that the
summary stands below what the others have to say."""

import time
from collections.abc import Sequence
from typing import Any

from megalite.observe.event_words import words_of
from megalite.observe.report.write import LiveReport
from megalite.observe.run_data import RunData, read_run
from megalite.observe.terminal import Terminal
from megalite.observe.trackers import open_trackers
from megalite.train.history import ENDS, Note
from megalite.train.job import Job
from megalite.train.run_log import View

NOTED = ("skipped", "skipped_on_request", "empty", "straggler", "profile")  # kinds of events


def open_views(job: Job, terminal: Terminal, note: Note) -> Sequence[View]:
    """The views of a run that continues what its folder holds. UserError where that cannot be."""
    run = read_run(job.folder.path)
    trackers = open_trackers(job.config, job.folder.path, job.progress.step, note)
    return [LiveReport(run, job.config.log.report_interval_s), trackers, TerminalView(job, terminal, run)]


class TerminalView:
    """What the terminal shows of each record. `run` holds the record already: the report has added it."""

    name = "terminal"

    def __init__(self, job: Job, terminal: Terminal, run: RunData) -> None:
        self._terminal, self._run, self._progress = terminal, run, job.progress
        self._title, self._steps = f"{job.config.model.name} on {job.config.data.source}", job.config.train.steps
        self._began = time.perf_counter()
        self._known_slow: set[int] = set()  # ranks that were named

    def add(self, record: dict[str, Any]) -> None:
        terminal, kind, step = self._terminal, record.get("kind"), record["step"]
        if kind is None:
            (terminal.evaluation if "val_loss" in record else terminal.step)(record)
        elif kind in ("start", "resume"):
            terminal.header(self._title, record["about"], first_step=step, steps=self._steps)
        elif kind == "checkpoint_failed":
            terminal.note(f"warning: {words_of(record)}")
        elif kind == "sample" and step < self._steps:  # else the summary shows it
            terminal.sample(step, record["prompt"], record["text"])
        elif kind in NOTED and record.get("rank") not in self._known_slow:
            terminal.note(f"step {step}: {words_of(record)}")
        elif kind in ENDS and kind != "failed":
            seconds, by = time.perf_counter() - self._began, record.get("by")
            terminal.finish(self._run, tokens=self._progress.tokens, seconds=seconds, stopped_by=by)
        if kind == "straggler":
            self._known_slow.add(record["rank"])

    def close(self) -> None:
        self._terminal.close()

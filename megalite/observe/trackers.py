"""The trackers of a run: where it is shown beside the run folder, at wandb and in TensorBoard.

One thread passes records on, so that a slow or failing tracker never holds training up. It starts with the first record
of metrics: opening a tracker (an import, a network) does not delay the first step.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from textwrap import indent
from threading import Thread
from typing import Any, Protocol

import numpy as np

from megalite.config.schema import Config
from megalite.errors.words import several
from megalite.observe.wandb import LOADS, flat_values, loads_of_experts, wandb_tracker
from megalite.train.history import ENDS, Note

BOARD = "tensorboard"  # folder of the run folder
LONGEST_QUEUE = 10_000  # records that may wait
MOST_LOADS = 100  # records of a run whose experts are drawn: they are many numbers
FINISH_S = 15.0  # that the end of a run waits for its trackers
OPENING_S = 60.0  # that it waits longer for trackers that are not open yet: a busy machine may take so long to import
RECORD_S = 0.01  # that it waits longer for each record that waits
FAILED_S = 2.0  # in all for a run that fails: the other ranks wait 3 s for what this one has to say


class Tracker(Protocol):
    """One place where a run is shown."""

    @property
    def rescue(self) -> str:
        """The command that shows what the tracker was given, where it was not done in time; may be empty."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Metrics.jsonl or events.jsonl holds one more record."""

    def finish(self, status: int) -> None:
        """The run has written its last record and ends with this exit status."""


class Trackers:
    """Passes every record on to all trackers of a run, by name: a view (train/run_log.py). From time to time a record
    holds the loads of experts, too. The first failure of a tracker is a note to the user."""

    name = "trackers"

    def __init__(
        self,
        openers: Mapping[str, Callable[[], Tracker | None]],
        note: Note,
        expert_layers: Sequence[int] = (),
        steps: int = 0,
    ) -> None:
        """`expert_layers`: the model's layers with experts. `steps`: those of the run."""
        self._openers, self._note = dict(openers), note
        self._trackers: dict[str, Tracker] = {}  # that are open
        self._failed: set[str] = set()  # trackers that the user was told of
        self._queue: SimpleQueue[Mapping[str, Any] | int] = SimpleQueue()  # an exit status at the end
        self._thread = Thread(target=self._run, name="trackers", daemon=True)
        self._opened = self._over = False
        self._layers, self._every, self._due = expert_layers, steps / MOST_LOADS, 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        if self._openers and not self._over:
            if "moe" in record and record["step"] >= self._due:
                record = {**record, LOADS: loads_of_experts(record, self._layers)}
                self._due = record["step"] + self._every
            if self._thread.ident is None and "kind" not in record:
                self._attempt(", ".join(self._openers), self._thread.start)
            if self._queue.qsize() < LONGEST_QUEUE:
                self._queue.put(record)
            else:
                self._warn(", ".join(self._openers), "too slow, and misses records")
        if record.get("kind") in ENDS:
            self.finish(record["status"])

    def close(self) -> None:
        self.finish(1)  # of a run that another job has taken over

    def finish(self, status: int) -> None:
        """Let the trackers finish, and wait for them. The second call does nothing."""
        if self._over or self._thread.ident is None:
            return
        self._over = True
        patience = FINISH_S + RECORD_S * self._queue.qsize() + (0.0 if self._opened else OPENING_S)
        self._queue.put(status)
        self._thread.join(FAILED_S if status else patience)
        if self._thread.is_alive():
            self._failed |= {*self._openers}  # they say nothing more
            missing, rescues = self._queue.qsize(), [it.rescue for it in self._trackers.values() if it.rescue]
            later = "".join(f"; to send the rest: {rescue}" for rescue in rescues)
            held = "metrics.jsonl and events.jsonl hold it all"
            self._note(f"{', '.join(self._openers)}: not done at the end of the run, {several(missing, 'record')} "
                       f"wait; {held}{later}")  # fmt: skip

    def _run(self) -> None:
        for name, opener in self._openers.items():
            tracker = self._attempt(name, opener)
            if tracker is not None:
                self._trackers[name] = tracker
        self._opened = True
        while not isinstance(record := self._queue.get(), int):
            for name, tracker in self._trackers.items():
                self._attempt(name, tracker.add, record)
        for name, tracker in self._trackers.items():
            self._attempt(name, tracker.finish, record)

    def _attempt(self, name: str, action: Callable[..., Any], *values: Any) -> Any:
        try:
            return action(*values)
        except Exception as error:
            self._warn(name, f"{type(error).__name__}: {error}")
            return None

    def _warn(self, name: str, reason: str) -> None:
        if name not in self._failed:
            self._failed.add(name)
            self._note(f"{name}: warning: {' '.join(reason.split())[:200]}; the run itself is not affected")


class TensorBoardTracker:
    """Event files in the run folder's tensorboard/ (log.tensorboard): every number as a scalar, loads of experts as
    histograms, and samples as text."""

    rescue = ""  # what is on disk is shown

    def __init__(self, folder: Path, step: int) -> None:
        """The run continues after `step`: what an earlier start wrote of later steps is not shown any more."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / BOARD), purge_step=step + 1, flush_secs=10)

    def add(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        if record.get("kind") == "sample":
            as_code = indent(record["prompt"] + record["text"], "    ", lambda text: True)  # Markdown would change it
            self._writer.add_text(f"samples/{' '.join(record['prompt'].split())[:60]}", as_code, step)
        for layer, loads in record.get(LOADS, {}).items():
            self._writer.add_histogram(f"{LOADS}/{layer}", np.array(loads), step)
        for name, value in flat_values(record).items() if "kind" not in record else ():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def finish(self, status: int) -> None:
        self._writer.close()


def open_trackers(config: Config, folder: Path, step: int, note: Note) -> Trackers:
    """The trackers that `config` and this machine's variables ask for, for rank 0. The run continues after `step`."""
    openers = dict[str, Callable[[], Tracker | None]]()
    if config.log.tensorboard:
        openers["tensorboard"] = lambda: TensorBoardTracker(folder, step)
    if (opener := wandb_tracker(config, folder, lambda text: note(f"wandb: {text}"))) is not None:
        openers["wandb"] = opener
    return Trackers(openers, note, config.model.expert_layers, config.train.steps)

"""The trackers of a run: the places beside the run folder where it is shown, wandb and TensorBoard.

Each has a thread of its own, so that a slow or failing one never hurts training or another tracker. The threads start
with the first record of metrics: opening a tracker (an import, a network) does not delay the first step.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
LONGEST_QUEUE = 10_000  # lines that may wait
MOST_LOADS = 100  # records of a run whose experts are drawn: they are many numbers
FINISH_S = 15.0  # that the end of a run waits for its trackers
OPENING_S = 60.0  # that it waits longer for one that is not open yet: a busy machine may take so long to import it
LINE_S = 0.01  # that it waits longer for each line that a tracker has not taken
FAILED_S = 2.0  # in all for a run that fails: the other ranks wait 3 s for what this one has to say
Line = Mapping[str, Any]


class Tracker(Protocol):
    """One place where a run is shown."""

    @property
    def rescue(self) -> str:
        """The command that shows what it was given, where it was not done at the end of the run; may be empty."""

    def add(self, line: Line) -> None:
        """Metrics.jsonl or events.jsonl holds one more line."""

    def finish(self, status: int) -> None:
        """The run has written its last line and ends with this exit status."""


class TrackerThread(Thread):
    """Passes lines on to the tracker that `opener` opens. What it does not take in time waits in a queue.

    `note` prints a line for the user: the first failure, and that the run ends before the tracker is done.
    """

    def __init__(self, name: str, opener: Callable[[], Tracker | None], note: Note) -> None:
        super().__init__(name=name, daemon=True)
        self._opener, self._note = opener, note
        self._lines: SimpleQueue[Line | int] = SimpleQueue()  # an exit status at the end
        self._given = self._taken = 0  # lines
        self._tracker: Tracker | None = None
        self._opened = self._failed = False

    def add(self, line: Line) -> None:
        if self.ident is None and "kind" not in line:
            try:
                self.start()
            except RuntimeError as error:  # the system gives no more threads
                self._warn(f"{type(error).__name__}: {error}")
        self._given += 1
        if self._lines.qsize() < LONGEST_QUEUE:
            self._lines.put(line)
        else:
            self._warn("it is too slow, and misses lines")

    def end(self, status: int) -> None:
        self._lines.put(status)

    @property
    def patience_s(self) -> float:
        """How long the end of a run waits for the tracker."""
        return FINISH_S + LINE_S * (self._given - self._taken) + (0.0 if self._opened else OPENING_S)

    def wait(self, seconds: float) -> None:
        """Wait so long for the tracker to finish."""
        if self.ident is None:  # the run ended before its first record
            return
        self.join(max(0.0, seconds))
        if self.is_alive():
            self._failed = True  # it says nothing more
            missing = several(self._given - self._taken, "line")
            rescue = f"; to send what it has: {self._tracker.rescue}" if self._tracker and self._tracker.rescue else ""
            held = "metrics.jsonl and events.jsonl hold it all"
            self._note(f"{self.name}: not done at the end of the run, {missing} did not get there; {held}{rescue}")

    def run(self) -> None:
        self._tracker = tracker = self._attempt(self._opener)
        self._opened = True
        while not isinstance(line := self._lines.get(), int):
            if tracker is not None:
                self._attempt(partial(tracker.add, line))
            self._taken += 1
        if tracker is not None:
            self._attempt(partial(tracker.finish, line))

    def _attempt(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            self._warn(f"{type(error).__name__}: {error}")
            return None

    def _warn(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._note(f"{self.name}: warning: {' '.join(reason.split())[:200]}; the run itself is not affected")


class Trackers:
    """Passes every line on to all trackers of a run, by name: a view (train/run_log.py). From time to time a line holds
    the loads of experts, too."""

    name = "trackers"

    def __init__(
        self,
        openers: Mapping[str, Callable[[], Tracker | None]],
        note: Note,
        expert_layers: Sequence[int] = (),
        steps: int = 0,
    ) -> None:
        """`expert_layers`: the model's layers with experts. `steps`: those of the run."""
        self._threads = [TrackerThread(name, opener, note) for name, opener in openers.items()]
        self._layers, self._every, self._due = expert_layers, steps / MOST_LOADS, 0.0

    def add(self, line: Line) -> None:
        if "moe" in line and line["step"] >= self._due:
            line = {**line, LOADS: loads_of_experts(line, self._layers)}
            self._due = line["step"] + self._every
        for thread in self._threads:
            thread.add(line)
        if line.get("kind") in ENDS:
            self.finish(line["status"])

    def close(self) -> None:
        self.finish(1)  # of a run that another job has taken over

    def finish(self, status: int) -> None:
        """Let the trackers finish, and wait for them. The second call does nothing."""
        threads, self._threads = self._threads, []
        until = [time.monotonic() + (FAILED_S if status else thread.patience_s) for thread in threads]
        for thread in threads:
            thread.end(status)
        for thread, limit in zip(threads, until, strict=True):
            thread.wait(limit - time.monotonic())


class TensorBoardTracker:
    """Event files in the run folder's tensorboard/ (log.tensorboard): every number as a scalar, loads of experts as
    histograms, and samples as text."""

    rescue = ""  # what is on disk is shown

    def __init__(self, folder: Path, step: int) -> None:
        """The run continues after `step`: what an earlier start wrote of later steps is not shown any more."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / BOARD), purge_step=step + 1, flush_secs=10)

    def add(self, line: Line) -> None:
        step = line["step"]
        if line.get("kind") == "sample":
            as_code = indent(line["prompt"] + line["text"], "    ", lambda text: True)  # Markdown would change it
            self._writer.add_text(f"samples/{' '.join(line['prompt'].split())[:60]}", as_code, step)
        for layer, loads in line.get(LOADS, {}).items():
            self._writer.add_histogram(f"{LOADS}/{layer}", np.array(loads), step)
        for name, value in flat_values(line).items() if "kind" not in line else ():
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

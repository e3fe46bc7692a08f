"""The trackers of a run: the places beside the run folder where it is shown, wandb and TensorBoard.

Each has a thread of its own, so that a slow or failing one never hurts training or another tracker. The threads start
with the first record of metrics: opening a tracker (an import, a network) does not delay the first step.
"""

import shlex
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from textwrap import indent
from threading import Thread
from typing import Any, Protocol

from megalite.config.schema import Config
from megalite.observe.wandb import flat_values, wandb_tracker
from megalite.train.history import Note

BOARD = "tensorboard"  # folder of the run folder
LONGEST_QUEUE = 10_000  # lines that may wait
FINISH_S = 15.0  # that the end of a run waits for its trackers
FAILED_S = 2.0  # the same for a run that fails: the other ranks wait 3 s for what this one has to say
Line = Mapping[str, Any]


class Tracker(Protocol):
    """One place where a run is shown."""

    def add(self, line: Line) -> None:
        """Metrics.jsonl or events.jsonl holds one more line."""

    def finish(self, status: int) -> None:
        """The run has written its last line and ends with this exit status."""


class _Background:
    """Passes lines on to the tracker that `opener` opens, on a thread. What it does not take in time waits in a queue.

    `note` prints a line for the user: the first failure, and `late` where the end of the run does not wait any longer.
    """

    def __init__(self, name: str, opener: Callable[[], Tracker | None], note: Note, late: str) -> None:
        self._name, self._open, self._note, self._late = name, opener, note, late
        self._lines: SimpleQueue[Line | int] = SimpleQueue()  # an exit status at the end
        self._failed = False
        self.thread = Thread(target=self._work, name=name, daemon=True)

    def add(self, line: Line) -> None:
        if self.thread.ident is None and "kind" not in line:
            try:
                self.thread.start()
            except RuntimeError as error:  # the system gives no more threads
                self._warn(error)
        if self._lines.qsize() < LONGEST_QUEUE:
            self._lines.put(line)
        else:
            self._warn("it is too slow, and misses lines")

    def end(self, status: int) -> None:
        self._lines.put(status)

    def wait(self, seconds: float) -> None:
        """Wait so long for the tracker to finish."""
        if self.thread.ident is None:  # the run ended before its first record
            return
        self.thread.join(max(0.0, seconds))
        if self.thread.is_alive():
            self._failed = True  # it says nothing more
            self._note(f"{self._name}: not done at the end of the run; {self._late}")

    def _work(self) -> None:
        tracker = self._attempt(self._open)
        while not isinstance(line := self._lines.get(), int):
            if tracker is not None:
                self._attempt(partial(tracker.add, line))
        if tracker is not None:
            self._attempt(partial(tracker.finish, line))

    def _attempt(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            self._warn(error)
            return None

    def _warn(self, reason: Exception | str) -> None:
        if not self._failed:
            self._failed = True
            words = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
            self._note(f"{self._name}: warning: {' '.join(words.split())[:200]}; the run itself is not affected")


class Trackers:
    """Passes every line on to all trackers of a run, each on a thread of its own."""

    def __init__(self, openers: Mapping[str, Callable[[], Tracker | None]], note: Note, late: str) -> None:
        self._all = [_Background(name, opener, note, late) for name, opener in openers.items()]
        self._finishing = False

    def add(self, line: Line) -> None:
        for tracker in self._all:
            tracker.add(line)

    def finish(self, status: int) -> None:
        """Let the trackers finish, and wait for them within one limit. The second call does nothing."""
        if self._finishing:
            return
        self._finishing = True
        until = time.monotonic() + (FAILED_S if status else FINISH_S)
        for tracker in self._all:
            tracker.end(status)
        for tracker in self._all:
            tracker.wait(until - time.monotonic())


class TensorBoardTracker:
    """Event files in the run folder's tensorboard/ (log.tensorboard): every number as a scalar, and samples as text."""

    def __init__(self, folder: Path, step: int) -> None:
        """The run continues after `step`: what an earlier start wrote of later steps is not shown any more."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / BOARD), purge_step=step + 1, flush_secs=10)

    def add(self, line: Line) -> None:
        step = line["step"]
        if line.get("kind") == "sample":
            as_code = indent(line["prompt"] + line["text"], "    ", lambda text: True)  # Markdown would change it
            self._writer.add_text(f"samples/{' '.join(line['prompt'].split())[:60]}", as_code, step)
        for name, value in flat_values(line).items() if "kind" not in line else ():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def finish(self, status: int) -> None:
        self._writer.close()


def open_trackers(config: Config, folder: Path, step: int, note: Note) -> Trackers:
    """The trackers that `config` and this machine's variables ask for, for rank 0. The run continues after `step`."""
    openers, late = dict[str, Callable[[], Tracker | None]](), "metrics.jsonl has it all"
    if config.log.tensorboard:
        openers["tensorboard"] = lambda: TensorBoardTracker(folder, step)
    if (opener := wandb_tracker(config, folder, lambda text: note(f"wandb: {text}"))) is not None:
        openers["wandb"] = opener
        late = f"to send the rest: wandb sync --include-online {shlex.quote(str(folder / 'wandb' / 'latest-run'))}"
    return Trackers(openers, note, late)

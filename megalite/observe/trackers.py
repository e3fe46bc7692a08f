"""The trackers of a run: where it is shown beside the run folder, at wandb and in TensorBoard.

One thread passes records on, so that a slow or failing tracker never holds training up. It starts with the first record
of metrics: opening a tracker (an import, a network) does not delay the first step.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from textwrap import indent
from threading import Thread
from typing import Any

from megalite.config.schema import Config
from megalite.errors.words import several
from megalite.observe.wandb import WandbTracker, flat_values, wandb_tracker
from megalite.train.history import ENDS, Note

LONGEST_QUEUE = 10_000  # records that may wait
FINISH_S = 60.0  # that the end of a run waits for its trackers: a busy machine may take so long to import
FAILED_S = 2.0  # in all for a run that fails: the other ranks wait 3 s for what this one has to say
Opener = Callable[[], "TensorBoardTracker | WandbTracker | None"]


class Trackers:
    """Passes every record on to all trackers of a run: a view (train/run_log.py). The first failure of a tracker is a
    note to the user. `rescue` of a tracker is the command that shows what was not done in time, or nothing."""

    name = "trackers"

    def __init__(self, openers: Mapping[str, Opener], note: Note) -> None:
        self._openers, self._names, self._note = dict(openers), ", ".join(openers), note
        self._trackers: dict[str, TensorBoardTracker | WandbTracker] = {}  # that are open
        self._failed: set[str] = set()  # trackers that the user was told of
        self._queue: SimpleQueue[Mapping[str, Any] | int] = SimpleQueue()  # an exit status at the end
        self._thread = Thread(target=self._run, name="trackers", daemon=True)
        self._over = not openers

    def add(self, record: Mapping[str, Any]) -> None:
        if not self._over:
            if self._thread.ident is None and "kind" not in record:
                self._attempt(self._names, self._thread.start)
            self._attempt(self._names, self._hand_over, record)
        if record.get("kind") in ENDS:
            self.finish(record["status"])

    def close(self) -> None:
        self.finish(1)  # of a run that another job has taken over

    def finish(self, status: int) -> None:
        """Let the trackers finish, and wait for them. The second call does nothing."""
        if self._over or self._thread.ident is None:
            return
        self._over = True
        self._queue.put(status)
        self._thread.join(FAILED_S if status else FINISH_S)
        if self._thread.is_alive():
            self._failed |= {*self._openers}  # they say nothing more
            later = "".join(f"; to send the rest: {it.rescue}" for it in self._trackers.values() if it.rescue)
            waiting = f"{several(self._queue.qsize(), 'record')} wait; the run folder holds all"
            self._note(f"{self._names}: not done at the end of the run, {waiting}{later}")

    def _hand_over(self, record: Mapping[str, Any]) -> None:
        if self._queue.qsize() >= LONGEST_QUEUE:
            raise OverflowError("too slow, and misses records")
        self._queue.put(record)

    def _run(self) -> None:
        for name, opener in self._openers.items():
            if (tracker := self._attempt(name, opener)) is not None:
                self._trackers[name] = tracker
        while not isinstance(record := self._queue.get(), int):
            for name, tracker in self._trackers.items():
                self._attempt(name, tracker.add, record)
        for name, tracker in self._trackers.items():
            self._attempt(name, tracker.finish, record)

    def _attempt(self, name: str, action: Callable[..., Any], *values: Any) -> Any:
        try:
            return action(*values)
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                self._note(f"{name}: warning: {reason}; the run itself is not affected")
            return None


class TensorBoardTracker:
    """Event files in the run folder's tensorboard/ (log.tensorboard): every number as a scalar, samples as text."""

    rescue = ""  # what is on disk is shown

    def __init__(self, folder: Path, step: int) -> None:
        """The run continues after `step`: what an earlier start wrote of later steps is not shown any more."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1, flush_secs=10)

    def add(self, record: Mapping[str, Any]) -> None:
        if record.get("kind") == "sample":
            as_code = indent(record["prompt"] + record["text"], "    ", lambda text: True)  # Markdown would change it
            self._writer.add_text(f"samples/{' '.join(record['prompt'].split())[:60]}", as_code, record["step"])
        for name, value in flat_values(record).items() if "kind" not in record else ():
            if name != "step":
                self._writer.add_scalar(name, value, record["step"])

    def finish(self, status: int) -> None:
        self._writer.close()


def open_trackers(config: Config, folder: Path, step: int, note: Note) -> Trackers:
    """The trackers that `config` and this machine's variables ask for, for rank 0. The run continues after `step`."""
    openers = dict[str, Opener]()
    if config.log.tensorboard:
        openers["tensorboard"] = lambda: TensorBoardTracker(folder, step)
    if (opener := wandb_tracker(config, folder, lambda text: note(f"wandb: {text}"))) is not None:
        openers["wandb"] = opener
    return Trackers(openers, note)

"""Runs a tracker on a thread of its own, so that a slow or failing one never hurts training.

The thread starts with the first record: opening a tracker (an import, a network) does not delay the first step. What
the tracker does not do in time waits in a queue. The first failure is told as one warning, further ones are silent.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, Full, Queue, SimpleQueue
from threading import Thread
from typing import Any

from megalite.observe.views import Tell, Tracker

LONGEST_QUEUE = 10_000  # records and samples that may wait
FINISH_S = 15.0  # that the end of a run waits for its trackers
FAILED_S = 2.0  # the same for a run that fails: the other ranks wait 3 s for what this one has to say


class BackgroundTracker:
    """Passes everything on to the tracker that `open_tracker` opens, or drops it where that gives None."""

    def __init__(self, name: str, open_tracker: Callable[[Tell], Tracker | None], tell: Tell, late: str) -> None:
        """`tell` prints a line for the user. Only the methods below call it, never the thread. `late` is what the user
        reads where the end of the run did not wait any longer."""
        self._name, self._open, self._tell, self._late = name, open_tracker, tell, late
        self._jobs: Queue[Callable[[Tracker], None] | None] = Queue(LONGEST_QUEUE)
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._warned = self._finishing = False
        self._thread = Thread(target=self._work, name=name, daemon=True)

    def record(self, record: Mapping[str, Any]) -> None:
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError as error:  # the system gives no more threads
                self._warn(_first_words(error))
        copy = dict(record)
        self._put(lambda tracker: tracker.record(copy))

    def sample(self, step: int, prompt: str, text: str) -> None:
        self._put(lambda tracker: tracker.sample(step, prompt, text))

    def finish(self, status: int) -> None:
        """The tracker is to finish; `wait` waits for it. The second call does nothing."""
        if self._finishing:
            return
        self._finishing = True
        for job in (lambda tracker: tracker.finish(status), None):
            while True:
                try:
                    self._jobs.put_nowait(job)
                    break
                except Full:  # the end takes the place of a record
                    with suppress(Empty):
                        self._jobs.get_nowait()

    def wait(self, seconds: float) -> None:
        """Wait so long for the tracker to finish, and print what it had to say."""
        if self._thread.ident is not None:  # else the run ends before its first record
            self._thread.join(max(0.0, seconds))
            if self._thread.is_alive():
                self._lines.put(f"not done at the end of the run; {self._late}")
        self._print_lines()

    def _put(self, job: Callable[[Tracker], None] | None) -> None:
        self._print_lines()
        try:
            self._jobs.put_nowait(job)
        except Full:
            self._warn("it is too slow, and misses records")

    def _print_lines(self) -> None:
        while not self._lines.empty():
            self._tell(f"{self._name}: {self._lines.get()}")

    def _work(self) -> None:
        tracker: Tracker | None = None
        try:
            tracker = self._open(self._lines.put)
        except Exception as error:
            self._warn(_first_words(error))
        while (job := self._jobs.get()) is not None:
            try:
                if tracker is not None:
                    job(tracker)
            except Exception as error:
                self._warn(_first_words(error))

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            self._lines.put(f"warning: {reason}; the run itself is not affected")


def finish_trackers(trackers: Sequence[BackgroundTracker], status: int) -> None:
    """End all trackers of a run at the same time, within one limit."""
    until = time.monotonic() + (FAILED_S if status else FINISH_S)
    for tracker in trackers:
        tracker.finish(status)
    for tracker in trackers:
        tracker.wait(until - time.monotonic())


def _first_words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]

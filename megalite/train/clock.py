"""Where the time of each step goes, without waiting for anything.

Training calls the clock whenever another part of the step begins (`switch`) and whenever a step ends (`lap`). On a CPU
the clock looks at the time then. On CUDA it leaves an event in the stream: the times are the device's own, waits for
the host included, and are read when the step is known to be done. Sums over tensor-parallel ranks happen inside layers:
they are part of `forward` and `backward`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from megalite.train.recorder import STEP_PARTS, StepPart


class StepClock:
    """The clock of one rank. Time that belongs to no other part, and is not left out (`restart`), is `other`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spare: list[Any] = []  # CUDA events of laps that were read
        self._part: StepPart = "other"
        self.listener: Callable[[StepPart], object] | None = None  # called when a part begins: the profiler
        self._marks: list[tuple[StepPart, Any]] = []  # the part that ended, and when
        self._began = self._now()

    def switch(self, part: StepPart) -> StepPart:
        """From now on time passes in `part`; the part before."""
        before = self._part
        if part != before:
            self._marks.append((before, self._now()))
            self._begin(part)
        return before

    @contextmanager
    def within(self, part: StepPart) -> Iterator[None]:
        """Time passes in `part`, and afterwards in the part before."""
        before = self.switch(part)
        try:
            yield
        finally:
            self.switch(before)

    def lap(self) -> "Lap":
        """A step ends here. On CUDA, its times may be read once the device has come to this point."""
        end = self._now()
        lap = Lap(self._spare if self._cuda else None, self._began, [*self._marks, (self._part, end)])
        self._marks, self._began = [], end
        self._begin("other")
        return lap

    def restart(self) -> None:
        """What has passed since the last step (an evaluation, a checkpoint) is no part of the next one."""
        if self._cuda:
            self._spare += [when for _, when in self._marks]
        self._marks, self._began = [], self._now()
        self._begin("other")

    def _begin(self, part: StepPart) -> None:
        self._part = part
        if self.listener is not None:
            self.listener(part)

    def _now(self) -> Any:
        if not self._cuda:
            return perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Lap:
    """One step's marks."""

    def __init__(self, spare: list[Any] | None, began: Any, marks: list[tuple[StepPart, Any]]) -> None:
        """`spare`: where the events go that nobody needs any more; None: the marks are seconds."""
        self._spare, self._began, self._marks = spare, began, marks

    def read(self) -> dict[StepPart, float]:
        """Seconds by part. Once, and on CUDA not before the step's figures are read."""
        split: dict[StepPart, float] = dict.fromkeys(STEP_PARTS, 0.0)
        for (_, start), (part, end) in pairwise([("other", self._began), *self._marks]):
            split[part] += end - start if self._spare is None else start.elapsed_time(end) / 1000
        if self._spare is not None:  # the last event is the beginning of the next lap
            self._spare += [self._began, *(when for _, when in self._marks[:-1])]
        self._marks = []
        return split

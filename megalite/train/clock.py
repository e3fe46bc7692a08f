"""The clock of a step, which waits for nothing: where the time of each step goes.

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

from megalite.train.history import STEP_PARTS, StepPart


class StepClock:
    """The clock of one rank. Time that belongs to no other part, and is not left out (`restart`), is `other`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spare: list[Any] = []  # CUDA events of laps that were read
        self.part: StepPart = "other"  # where time passes now
        self.listener: Callable[[StepPart], object] | None = None  # called when a part begins: the profiler
        self._marks: list[tuple[StepPart, Any]] = []  # the part that ended, and when
        self._began = self._now()

    def switch(self, part: StepPart) -> StepPart:
        """From now on time passes in `part`. Returns the part before."""
        before = self.part
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

    def lap(self) -> Callable[[], dict[StepPart, float]]:
        """A step ends here. What is returned gives the seconds of the step by part: call it once, and on CUDA not
        before the device has come to this point."""
        began, marks = self._began, [*self._marks, (self.part, self._now())]
        self._marks, self._began = [], marks[-1][1]
        self._begin("other")

        def read() -> dict[StepPart, float]:
            split: dict[StepPart, float] = dict.fromkeys(STEP_PARTS, 0.0)
            for (_, start), (part, end) in pairwise([("other", began), *marks]):
                split[part] += start.elapsed_time(end) / 1000 if self._cuda else end - start
            if self._cuda:  # the last event is the beginning of the next lap
                self._spare += [began, *(when for _, when in marks[:-1])]
            return split

        return read

    def restart(self) -> None:
        """Leave out the time since the last step (an evaluation, a checkpoint)."""
        if self._cuda:
            self._spare += [when for _, when in self._marks]
        self._marks, self._began = [], self._now()
        self._begin("other")

    def _begin(self, part: StepPart) -> None:
        self.part = part
        if self.listener is not None:
            self.listener(part)

    def _now(self) -> Any:
        if not self._cuda:
            return perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

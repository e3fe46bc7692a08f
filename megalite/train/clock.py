"""Where the time of each step goes: the clock, which waits for nothing, and torch's profiler for single steps.

Training calls the clock whenever another part of the step begins (`switch`) and whenever a step ends (`lap`). On a CPU
the clock looks at the time then. On CUDA it leaves an event in the stream: the times are the device's own, waits for
the host included, and are read when the step is known to be done. Sums over tensor-parallel ranks happen inside layers:
they are part of `forward` and `backward`.
"""

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megalite.train.history import STEP_PARTS, StepPart

STEP, PART = "train step", "part: "  # labels in a trace: of the whole step, and before the name of a part
LARGEST_TRACE = 256 << 20  # bytes before compression; to read it takes ten times as much memory


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
        """From now on time passes in `part`; the part before."""
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

    def lap(self) -> "Lap":
        """A step ends here. On CUDA, its times may be read once the device has come to this point."""
        end = self._now()
        lap = Lap(self._spare if self._cuda else None, self._began, [*self._marks, (self.part, end)])
        self._marks, self._began = [], end
        self._begin("other")
        return lap

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


@contextmanager
def profiled(clock: StepClock, device: torch.device) -> Iterator[profile]:
    """What happens inside is one step: torch's record of it, with the parts as labelled ranges one behind the other.

    Such a step waits for its device and takes longer than others.
    """
    cuda, thread, label = device.type == "cuda", threading.get_ident(), ExitStack()

    def begin(part: StepPart) -> None:
        """The part that was open ends. Another thread's view of it (autograd's) is not the step's."""
        if threading.get_ident() == thread:
            label.close()
            label.enter_context(record_function(PART + part))

    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as recorded:
        if cuda:
            torch.cuda.synchronize(device)
        with record_function("begin"):  # the first range of a trace costs what the others do not
            pass
        clock.listener = begin
        try:
            with record_function(STEP), label:
                begin("other")
                yield recorded
                label.close()
                if cuda:
                    torch.cuda.synchronize(device)
        finally:
            clock.listener = None


def chrome_trace(recorded: profile) -> bytes:
    """The record as Chrome's JSON. Raises OSError, or ValueError where it is too large to keep."""
    with tempfile.TemporaryDirectory(prefix="megalite-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        if (size := path.stat().st_size) > LARGEST_TRACE:
            raise ValueError(f"a trace of {size >> 20} MiB is too large to keep; fewer microbatches make it smaller")
        return path.read_bytes()

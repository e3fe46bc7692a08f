"""Single steps as torch's profiler sees them (train.profile_steps).

A recorded step waits for its device and takes longer than others.
"""

import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megalite.train.clock import StepClock
from megalite.train.recorder import Recorder, StepPart

STEP, PART = "train step", "part: "  # labels: of the whole step, and before the name of a part
LARGEST_TRACE = 256 << 20  # bytes before compression; to read it takes ten times as much memory


class StepProfiler:
    """Records the steps in `steps` on this rank, labelled as the `clock` tells their parts. Beginning and
    reporting take time, too, which is no step's."""

    def __init__(self, steps: Collection[int], clock: StepClock, device: torch.device) -> None:
        self._steps, self._clock, self._device = frozenset(steps), clock, device
        self._recorded: profile | None = None  # and not written

    def due(self, step: int) -> bool:
        """Whether the step is to be recorded, and written afterwards."""
        return step in self._steps

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What happens inside is one step."""
        cuda = self._device.type == "cuda"
        labels = _Labels()
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as recorded:
            self._wait_for_device()
            self._clock.listener = labels.begin
            try:
                with record_function("begin"):  # the first range of a trace costs what the others do not
                    pass
                with record_function(STEP):
                    labels.begin("other")
                    yield
                    labels.end()
                    self._wait_for_device()
            finally:
                labels.end()
                self._clock.listener = None
        self._recorded = recorded

    def report(self, step: int, recorder: Recorder) -> None:
        """Hand over what the profiler recorded of the step. This rank alone knows whether it can."""
        recorded, self._recorded = self._recorded, None
        assert recorded is not None, "the step was recorded"
        try:
            trace = _exported(recorded)
        except (OSError, ValueError) as error:
            recorder.not_profiled(step, f"{type(error).__name__}: {error}")
        else:
            recorder.profiled(step, trace)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Labels:
    """The parts of a step as ranges of its trace, one behind the other."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._open: record_function | None = None

    def begin(self, part: StepPart) -> None:
        """The part that was open ends, `part` begins. Another thread's view of it (autograd's) is not the step's."""
        if threading.get_ident() == self._thread:
            self.end()
            self._open = record_function(PART + part)
            self._open.__enter__()

    def end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def _exported(recorded: profile) -> bytes:
    """The trace as Chrome's JSON. Raises ValueError where it is too large to keep."""
    with tempfile.TemporaryDirectory(prefix="megalite-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        if (size := path.stat().st_size) > LARGEST_TRACE:
            raise ValueError(f"a trace of {size >> 20} MiB is too large to keep; fewer microbatches make it smaller")
        return path.read_bytes()

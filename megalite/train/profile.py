"""Single steps as torch's profiler sees them (train.profile_steps): a trace, and where the step's time went.

For each of these steps each rank writes two files into the run's profile folder: `step-00000012-rank-00003.json`, its
`TimeSplit`, and `step-00000012-rank-00003.trace.json.gz`, which ui.perfetto.dev opens. A recorded step waits for its
device and takes longer than others. A disk that takes nothing costs the files, never the run.
"""

import gzip
import json
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megalite.checkpoint.commit import replace_synced
from megalite.parallel.context import ParallelContext
from megalite.train.clock import StepClock
from megalite.train.records import Part
from megalite.train.trace import PART, STEP, TimeSplit, time_split

FOLDER = "profile"  # of a run
LARGEST_TRACE = 256 << 20  # bytes before compression; to read it takes ten times as much memory


class Told(Protocol):
    """Who hears what came of a recorded step."""

    def profiled(self, step: int, split: TimeSplit, folder: Path) -> None: ...

    def not_profiled(self, step: int, why: str) -> None: ...


class StepProfiler:
    """Records the steps in `steps` on this rank, labelled as the `clock` tells their parts. To begin and to write takes
    time, too, which is no step's."""

    def __init__(
        self, run_dir: Path, steps: Collection[int], clock: StepClock, context: ParallelContext, told: Told
    ) -> None:
        self._folder, self._steps = run_dir / FOLDER, frozenset(steps)
        self._clock, self._context, self._told = clock, context, told
        self._recorded: profile | None = None  # and not written

    def due(self, step: int) -> bool:
        """Whether the step is to be recorded, and written afterwards."""
        return step in self._steps

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What happens inside is one step."""
        cuda = self._context.device.type == "cuda"
        labels = _Labels()
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as recorded:
            self._settle()
            self._clock.listener = labels.begin
            try:
                with record_function("begin"):  # the first range of a trace costs what the others do not
                    pass
                with record_function(STEP):
                    labels.begin("other")
                    yield
                    labels.end()
                    self._settle()
            finally:
                labels.end()
                self._clock.listener = None
        self._recorded = recorded

    def write(self, step: int) -> None:
        """Write what was recorded of the step. This rank alone knows whether it can."""
        recorded, self._recorded = self._recorded, None
        assert recorded is not None, "the step was recorded"
        try:
            split = self._written(recorded, step)
        except (OSError, ValueError) as error:  # an incomplete trace is no JSON
            self._told.not_profiled(step, f"{type(error).__name__}: {error}")
        else:
            self._told.profiled(step, split, self._folder)

    def _settle(self) -> None:
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)

    def _written(self, recorded: profile, step: int) -> TimeSplit:
        trace = _exported(recorded)
        split = time_split(json.loads(trace)["traceEvents"])
        self._folder.mkdir(exist_ok=True)
        name = f"step-{step:08d}-rank-{self._context.rank:05d}"
        facts = {"step": step, "rank": self._context.rank, **asdict(split)}
        replace_synced(self._folder / f"{name}.trace.json.gz", gzip.compress(trace, compresslevel=5))
        replace_synced(self._folder / f"{name}.json", (json.dumps(facts, indent=1) + "\n").encode())
        return split


class _Labels:
    """The parts of a step as ranges of its trace, one behind the other."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._open: record_function | None = None

    def begin(self, part: Part) -> None:
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

"""What a rank measures while it trains: speed, utilisation, memory, and which ranks are slow.

The speed is the tokens of training steps over the time of training steps. Evaluations, samples and checkpoints lie
between steps and count nowhere. A step that is not applied counts, as it is computed. A record carries the speed of the
steps since the record before it (`tokens_per_s`) and that of the whole run (`mean_tokens_per_s`).

A rank's own time is what it computes without waiting for others. Ranks that hold the same stage of the pipeline compute
alike, so one that takes much longer than half of them has a reason of its own: a hot or throttled device, a busy host.
Inside a tensor-parallel group ranks wait for each other in every layer, so a slow one slows all of its group, which
stands out among other groups.
"""

import resource
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megalite.data.batches import StepBatches
from megalite.launch.context import ParallelContext
from megalite.model.flops import flops_per_token, peak_flops
from megalite.train.history import METRICS, read_metrics
from megalite.train.job import Job
from megalite.train.recorder import RankFigures, StepPart, StepRecord, Straggler
from megalite.train.step import StepFigures

GIB = 1 << 30
OWN: tuple[StepPart, ...] = ("forward", "backward", "optimizer")  # what a rank does without waiting for others
SLOW = 1.3  # times as long as the median of its equals
FEWEST, MOST = 5, 50  # steps to judge by: the newest


@dataclass
class Interval:
    """The steps since the last record."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0  # for data
    split: Counter[StepPart] = field(default_factory=Counter)  # seconds of this rank, by part

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Meter:
    """Adds up the steps of a run. `training_s` and `mean_tokens_per_s` are those of earlier starts."""

    def __init__(self, training_s: float = 0.0, mean_tokens_per_s: float = 0.0) -> None:
        self.training_s = training_s
        self._tokens = training_s * mean_tokens_per_s
        self._interval = Interval()

    @property
    def mean_tokens_per_s(self) -> float:
        """Of the whole run; 0 before its first step."""
        return self._tokens / self.training_s if self.training_s else 0.0

    def add(self, tokens: int, seconds: float, wait_s: float, split: Mapping[StepPart, float]) -> None:
        """One step."""
        self.training_s += seconds
        self._tokens += tokens
        interval = self._interval
        interval.steps += 1
        interval.tokens += tokens
        interval.seconds += seconds
        interval.wait_s += wait_s
        interval.split.update(split)

    def take(self) -> Interval:
        """The steps since the last call."""
        interval, self._interval = self._interval, Interval()
        return interval


class RunFigures:
    """Measures the steps of one run on this rank."""

    def __init__(self, job: Job) -> None:
        """Continues the figures of earlier starts, which rank 0 reads."""
        self._job = job
        self._began = time.perf_counter()  # of the step
        known = _newest_record(job) if job.context.rank == 0 else {}
        self._meter = Meter(known.get("training_s", 0.0), known.get("mean_tokens_per_s", 0.0))
        self._newest: dict[str, Any] | None = None  # of the newest step, if it has no record yet
        self._own: deque[float] = deque(maxlen=MOST)  # seconds that this rank computed, by step
        device = job.context.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._peak = peak_flops(name, str(job.context.dtype).removeprefix("torch."))

    def restart_clock(self) -> None:
        """What passed since the last step (an evaluation, a checkpoint) is not part of the next one."""
        self._began = time.perf_counter()
        self._job.training.clock.restart()

    def pass_over(self) -> None:
        """A step passed in which nothing was computed, or nothing that counts."""
        self._began = time.perf_counter()

    def add(self, data: StepBatches, figures: StepFigures, lr: float, split: Mapping[StepPart, float]) -> None:
        """A step is done; `split` is where this rank's time went."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        progress, train = self._job.progress, self._job.config.train
        self._meter.add(data.planned.sequences * train.seq_length, seconds, data.wait_s, split)
        self._own.append(sum(split[part] for part in OWN))
        self._newest = {
            "step": progress.step,
            "steps": train.steps,
            "tokens": progress.tokens,
            "loss": figures.loss,
            "lr": lr,
            "grad_norm": figures.grad_norm,
            "bad_steps": progress.bad_steps,
            "loss_scale": None if self._job.training.loss_scale is None else figures.loss_scale,
        }

    def record(self) -> StepRecord | None:
        """The newest step with the figures of those since the last record; None where there is no step since then."""
        newest, self._newest = self._newest, None
        if newest is None:
            return None
        interval = self._meter.take()
        return StepRecord(
            **newest,
            tokens_per_s=interval.tokens_per_s,
            mean_tokens_per_s=self._meter.mean_tokens_per_s,
            step_time_s=interval.seconds / interval.steps,
            training_s=self._meter.training_s,
            memory_gib=memory_gib(self._job.context.device),
            data_wait_share=min(1.0, interval.wait_s / interval.seconds),
            time_split={part: round(spent / interval.steps, 6) for part, spent in interval.split.items()},
            mfu=self._utilisation(interval.tokens_per_s, causal=False),
            mfu_causal=self._utilisation(interval.tokens_per_s, causal=True),
        )

    def _utilisation(self, tokens_per_s: float, *, causal: bool) -> float | None:
        """Model FLOPs utilisation; None where the device's peak is not known."""
        if self._peak is None:
            return None
        flops = flops_per_token(self._job.config.model, self._job.config.train.seq_length, causal=causal)
        return tokens_per_s * flops / (self._peak * self._job.context.world_size)

    def gather(self) -> RankFigures:
        """Figures of all ranks. All ranks call it after the same step: one small all-gather on the host."""
        context = self._job.context
        own = statistics.median(self._own) if self._own else 0.0
        gathered = context.gather_json([round(memory_gib(context.device), 3), round(own, 6)])
        memory, compute = ([figures[at] for figures in gathered] for at in (0, 1))
        enough = len(self._own) >= FEWEST
        return RankFigures(memory, compute, stragglers(compute, _stages(context)) if enough else [])


def stragglers(compute_s: Sequence[float], stages: Sequence[int]) -> list[Straggler]:
    """Ranks that take more than SLOW times the (lower) median of the ranks of its stage, slowest first.

    `stages`: the pipeline rank of each rank. A stage that one rank holds has nobody to compare with.
    """
    found = []
    for stage in sorted(set(stages)):
        equals = [rank for rank, its in enumerate(stages) if its == stage]
        usual = statistics.median_low(compute_s[rank] for rank in equals)
        if usual > 0:
            found += [Straggler(rank, compute_s[rank] / usual) for rank in equals if compute_s[rank] > SLOW * usual]
    return sorted(found, key=lambda straggler: -straggler.times)


def memory_gib(device: torch.device) -> float:
    """Peak memory of this rank so far: of the accelerator's allocator, on a CPU of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB  # macOS counts bytes, Linux KiB


def _stages(context: ParallelContext) -> list[int]:
    """By rank: its place in its pipeline."""
    return [context.layout.dense.coordinates(rank)["pp"] for rank in range(context.world_size)]


def _newest_record(job: Job) -> dict[str, Any]:
    """The newest record of a step that earlier starts have left and this one continues."""
    records = read_metrics(job.folder.path / METRICS)
    known = [record for record in records if "loss" in record and record["step"] <= job.progress.step]
    return known[-1] if known else {}

"""What a rank measures while it trains: speed, utilisation, memory, and which ranks are slow.

The speed is the tokens of training steps over the time of training steps by the step's clock, on CUDA the device's: the
host reads figures late, several steps' at once. Evaluations, samples and checkpoints lie
between steps and count nowhere. A step that is not applied counts, as it is computed. A record carries the speed of the
steps since the record before it (`tokens_per_s`) and that of the whole run (`mean_tokens_per_s`).

Ranks that hold the same stage of the pipeline compute alike, so one that takes much longer than half of them has a
reason of its own: a hot or throttled device, a busy host. In a tensor-parallel group a slow rank slows all of its
group, which stands out among other groups.
"""

import resource
import statistics
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megalite.data.batches import StepBatches
from megalite.model.flops import flops_per_token, peak_flops
from megalite.moe.balance import in_numbers
from megalite.train.history import METRICS, read_metrics
from megalite.train.job import Job
from megalite.train.recorder import StepPart, StepRecord
from megalite.train.step import StepFigures

GIB = 1 << 30
OWN: tuple[StepPart, ...] = ("forward", "backward", "optimizer")  # what a rank does without waiting for others
SLOW = 1.3  # times as long as the median of its equals
FEWEST, MOST = 5, 50  # steps to judge by: the newest


@dataclass
class Steps:
    """Sums over some steps: those since the last record, or those of the whole run."""

    count: int = 0
    tokens: float = 0
    seconds: float = 0.0
    wait_s: float = 0.0  # for data
    split: Counter[StepPart] = field(default_factory=Counter)  # seconds of this rank, by part
    cuts: Counter[str] = field(default_factory=Counter)  # microbatches of packed documents, by their cut for cp
    routing: torch.Tensor | None = None  # of applied steps, StepFigures.routing

    def add(self, tokens: int, seconds: float, wait_s: float, split: Mapping[StepPart, float]) -> None:
        """One more step."""
        self.count += 1
        self.tokens += tokens
        self.seconds += seconds
        self.wait_s += wait_s
        self.split.update(split)

    @property
    def tokens_per_s(self) -> float:
        """0 before the first step."""
        return self.tokens / self.seconds if self.seconds else 0.0


class RunFigures:
    """Measures the steps of one run on this rank."""

    def __init__(self, job: Job) -> None:
        """Continues the figures of earlier starts, which rank 0 reads."""
        self._job = job
        known = _newest_record(job) if job.context.rank == 0 else {}
        seconds = known.get("training_s", 0.0)
        self._run = Steps(tokens=seconds * known.get("mean_tokens_per_s", 0.0), seconds=seconds)
        self._since = Steps()  # since the last record
        self._newest: dict[str, Any] | None = None  # of the newest step, if it has no record yet
        self._own: deque[float] = deque(maxlen=MOST)  # seconds that this rank computed, by step
        self._whole: deque[float] = deque(maxlen=MOST)  # seconds of these steps
        device, model, seq_length = job.context.device, job.config.model, job.config.train.seq_length
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._peak = peak_flops(name, str(job.context.dtype).removeprefix("torch."))
        self._flops = {causal: flops_per_token(model, seq_length, causal=causal) for causal in (False, True)}

    def add(self, data: StepBatches, figures: StepFigures, lr: float, split: Mapping[StepPart, float]) -> None:
        """A step is done; `split` is where this rank's time went."""
        seconds = sum(split.values())
        progress, train = self._job.progress, self._job.config.train
        for steps in (self._run, self._since):
            steps.add(data.planned.sequences * train.seq_length, seconds, data.wait_s, split)
        self._since.cuts.update(it.plan.cut for it in data.microbatches if it.plan and it.documents is not None)
        self._own.append(sum(split[part] for part in OWN))
        self._whole.append(seconds)
        if figures.routing is not None and not figures.skipped:
            before = self._since.routing
            self._since.routing = figures.routing if before is None else before + figures.routing
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
        if self._newest is None:
            return None
        newest, since = self._newest, self._since
        self._newest, self._since = None, Steps()
        return StepRecord(
            **newest,
            tokens_per_s=since.tokens_per_s,
            mean_tokens_per_s=self._run.tokens_per_s,
            step_time_s=since.seconds / since.count,
            training_s=self._run.seconds,
            memory_gib=memory_gib(self._job.context.device),
            data_wait_share=min(1.0, since.wait_s / since.seconds),
            time_split={part: round(spent / since.count, 6) for part, spent in since.split.items()},
            mfu=self._utilisation(since.tokens_per_s, causal=False),
            mfu_causal=self._utilisation(since.tokens_per_s, causal=True),
            cuts=dict(since.cuts) or None,
            moe=None if since.routing is None else in_numbers(since.routing),
        )

    def _utilisation(self, tokens_per_s: float, *, causal: bool) -> float | None:
        """Model FLOPs utilisation; None where the device's peak is not known."""
        world = self._job.context.world_size
        return None if self._peak is None else tokens_per_s * self._flops[causal] / (self._peak * world)

    def gather(self) -> tuple[list[float], list[float], dict[int, tuple[float, float]]]:
        """Of all ranks: peak memory in GiB, seconds of computing in a step, and who is slow: how many times as long as
        its equals it computes (`stragglers`), and the share of a step by which that is longer.

        All ranks call it after the same step: one small all-gather on the host.
        """
        context = self._job.context
        own = statistics.median(self._own) if self._own else 0.0
        gathered = context.gather_json([round(memory_gib(context.device), 3), round(own, 6)])
        memory, compute = ([figures[at] for figures in gathered] for at in (0, 1))
        stages = [context.layout.dense.coordinates(rank)["pp"] for rank in range(context.world_size)]
        if len(self._own) < FEWEST:
            return memory, compute, {}
        step, slow = statistics.median(self._whole), stragglers(compute, stages)
        costs = {rank: (times, compute[rank] * (1 - 1 / times) / step) for rank, times in slow.items()}
        return memory, compute, costs


def stragglers(compute_s: Sequence[float], stages: Sequence[int]) -> dict[int, float]:
    """Ranks that take more than SLOW times the (lower) median of the ranks of its stage, and how many times as long.

    `stages`: the pipeline rank of each rank. A stage that one rank holds has nobody to compare with.
    """
    found: dict[int, float] = {}
    for stage in sorted(set(stages)):
        equals = [rank for rank, its in enumerate(stages) if its == stage]
        usual = statistics.median_low(compute_s[rank] for rank in equals)
        if usual > 0:
            found |= {rank: compute_s[rank] / usual for rank in equals if compute_s[rank] > SLOW * usual}
    return found


def memory_gib(device: torch.device) -> float:
    """Peak memory of this rank so far: of the accelerator's allocator, on a CPU of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB  # macOS counts bytes, Linux KiB


def _newest_record(job: Job) -> dict[str, Any]:
    """The newest record of a step that earlier starts have left and this one continues."""
    records = read_metrics(job.folder.path / METRICS)
    known = [record for record in records if "loss" in record and record["step"] <= job.progress.step]
    return known[-1] if known else {}

"""The metrics of a step, from the device to metrics.jsonl, and what a rank measures while it trains.

The speed is the tokens of training steps over the time of training steps by the step's clock. Evaluations, samples and
checkpoints lie between steps and count nowhere. A step that is not applied counts, as it is computed.

The clock waits for nothing: on CUDA it leaves events in the stream, whose times are read when the step is known to be
done. Sums over tensor-parallel ranks happen inside layers: they are part of `forward` and `backward`.
"""

import resource
import statistics
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from time import perf_counter
from typing import Any

import torch

from megalite.config.schema import Config
from megalite.data.batches import StepBatches
from megalite.data.open import source_names
from megalite.launch.context import ParallelContext
from megalite.model.flops import flops_per_token, peak_flops
from megalite.moe.balance import in_numbers
from megalite.optim.layer_norms import norms_of
from megalite.optim.update_sizes import elements_of, sizes_of
from megalite.train.history import STEP_PARTS, Record, RunLog, StepPart

TimeSplit = dict[StepPart, float]  # seconds of this rank, by part of a step
NO_TIME: TimeSplit = dict.fromkeys(STEP_PARTS, 0.0)
OWN: tuple[StepPart, ...] = ("forward", "backward", "optimizer")  # what a rank does without waiting for others
SLOW = 1.3  # times as long as the median of its stage
FEWEST, MOST = 5, 50  # steps to judge by: the newest


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step: nats, seconds, tokens; equal on every rank but for the time split."""

    loss: float
    grad_norm: float
    batch_tokens: int  # unmasked tokens of the global batch
    skipped: bool  # nothing was updated: loss or gradient not finite or a spike, no token, or input was refused
    stop: bool  # some rank was asked to stop
    refused: bool  # some rank's input was refused, it computed with nothing
    lr: float
    loss_scale: float | None = None  # of fp16: the loss was multiplied by it before backward
    routing: torch.Tensor | None = None  # [layers with experts, 2 E + 5] of moe/balance.py, in host memory
    largest_logits: Sequence[float] = ()  # of attention by layer, with optimizer.qk_clip
    squares: torch.Tensor | None = None  # [2, cells] of optim/update_sizes.py, in host memory
    layers: torch.Tensor | None = None  # [2, layers] of optim/layer_norms.py, in host memory
    sources: torch.Tensor | None = None  # [parts of a blend, 2]: sum of losses and tokens, in host memory
    time_split: TimeSplit = field(default_factory=NO_TIME.copy)


class StepClock:
    """The clock of one rank. Training calls it whenever another part of the step begins (`switch`) and when a step ends
    (`lap`). Time that belongs to no other part, and is not left out (`restart`), is `other`."""

    part: StepPart  # where time passes now

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.listener: Callable[[StepPart], object] = lambda part: None  # called when a part begins: the profiler
        self.restart()

    def restart(self, now: Any = None) -> None:
        """A step begins, by default at this moment: the time since the last step (an evaluation, say) is left out."""
        self._marks: list[tuple[StepPart, Any]] = [("other", now or self._now())]  # the part that ended, and when
        self.part = "other"
        self.listener("other")

    def switch(self, part: StepPart) -> StepPart:
        """From now on time passes in `part`. Returns the part before."""
        before = self.part
        if part != before:
            self._marks.append((before, self._now()))
            self.part = part
            self.listener(part)
        return before

    @contextmanager
    def within(self, part: StepPart) -> Iterator[None]:
        """Time passes in `part`, and afterwards in the part before."""
        before = self.switch(part)
        try:
            yield
        finally:
            self.switch(before)

    def lap(self) -> Callable[[], TimeSplit]:
        """A step ends here. What is returned gives the seconds of the step by part: on CUDA not to be called before the
        device has come to this point."""
        marks = [*self._marks, (self.part, self._now())]
        self.restart(marks[-1][1])

        def read() -> TimeSplit:
            split = NO_TIME.copy()
            for (_, start), (part, end) in pairwise(marks):
                split[part] += start.elapsed_time(end) / 1000 if self._cuda else end - start
            return split

        return read

    def _now(self) -> Any:
        if self._cuda:
            return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return perf_counter()


class Meter:
    """Measures the steps of one run on this rank."""

    def __init__(self, config: Config, context: ParallelContext, before: Mapping[str, Any]) -> None:
        """`before`: the newest line of a step that earlier starts have left, where the run's mean goes on; or empty."""
        self._config, self._context, self._seq_length = config, context, config.train.seq_length
        self._run_s: float = before.get("training_s", 0.0)
        self._run_tokens: float = self._run_s * before.get("mean_tokens_per_s", 0.0)
        self._splits: deque[TimeSplit] = deque(maxlen=MOST)
        self._speeds = deque[tuple[float, float]](maxlen=10_000)  # of the newest steps: tokens per second, and seconds
        name = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu"
        self._peak = peak_flops(name, str(context.dtype).removeprefix("torch."))
        self._flops = [flops_per_token(config.model, self._seq_length, causal=causal) for causal in (False, True)]
        self._elements = elements_of(config) if config.log.update_sizes else {}
        self._names = source_names(config.data)
        self._begin()

    def _begin(self) -> None:
        """Sums over the steps since the last line begin anew."""
        self._newest: tuple[StepMetrics, int] | None = None  # and its number
        self._steps, self._tokens, self._wait_s, self._cuts = 0, 0, 0.0, Counter[str]()
        self._split, self._routing, self._logits = NO_TIME, torch.zeros(()), list[float]()
        self._of_layers: Record = {}
        self._sources = torch.zeros(())

    def add(self, metrics: StepMetrics, data: StepBatches) -> None:
        """A step is done."""
        self._newest = metrics, data.planned.step
        self._steps += 1
        self._tokens += (tokens := data.planned.sequences * self._seq_length)
        self._of_layers = {}  # of this step alone
        if metrics.layers is not None:
            self._of_layers = norms_of(metrics.layers, self._config, tokens, metrics.loss_scale or 1.0)
        if self._splits:  # the first step of a start compiles
            self._speeds.append((tokens / (seconds := sum(metrics.time_split.values())), seconds))
        self._wait_s += data.wait_s
        self._cuts.update(it.plan.cut for it in data.microbatches if it.plan and it.documents is not None)
        self._split = {part: self._split[part] + spent for part, spent in metrics.time_split.items()}
        if metrics.routing is not None and not metrics.skipped:
            self._routing = self._routing + metrics.routing
        if metrics.sources is not None and not metrics.skipped:
            self._sources = self._sources + metrics.sources
        if not metrics.skipped:  # else they may be no numbers
            self._logits = [*map(max, self._logits or metrics.largest_logits, metrics.largest_logits)]
        self._splits.append(metrics.time_split)

    def line(self, *, tokens: int, bad_steps: int) -> Record | None:
        """The line of metrics.jsonl: the newest step, and means over the steps since the line before. None where there
        is no step since then. `tokens` and `bad_steps` of the whole run: trained on, and not applied."""
        if self._newest is None:
            return None
        (metrics, step), seconds = self._newest, sum(self._split.values())
        self._run_s, self._run_tokens = self._run_s + seconds, self._run_tokens + self._tokens
        of_peak = None if self._peak is None else self._tokens / seconds / (self._peak * self._context.world_size)
        line: Record = {
            "step": step,
            "tokens": tokens,
            "loss": metrics.loss,
            "lr": metrics.lr,
            "grad_norm": metrics.grad_norm,
            "tokens_per_s": self._tokens / seconds,
            "mean_tokens_per_s": self._run_tokens / self._run_s,  # of the whole run
            "step_time_s": seconds / self._steps,
            "training_s": self._run_s,  # of all steps of the run
            "memory_gib": memory_gib(self._context.device),
            "data_wait_share": min(1.0, self._wait_s / seconds),
            "time_split": {part: round(spent / self._steps, 6) for part, spent in self._split.items()},
            "mfu": of_peak and of_peak * self._flops[0],  # PaLM's formula: full attention, no recompute
            "mfu_causal": of_peak and of_peak * self._flops[1],
            "bad_steps": bad_steps,
        }
        line |= {} if metrics.loss_scale is None else {"loss_scale": metrics.loss_scale}
        line |= {"cuts": dict(self._cuts)} if self._cuts else {}
        line |= {"moe": in_numbers(self._routing)} if self._routing.ndim else {}
        if self._sources.ndim:
            sums = dict(zip(self._names, self._sources.tolist(), strict=True))
            line["source_loss"] = {name: loss / tokens for name, (loss, tokens) in sums.items() if tokens}
            line["source_tokens"] = {name: int(tokens) for name, (_, tokens) in sums.items()}
        if self._logits:
            of_layers = {str(layer): logit for layer, logit in enumerate(self._logits)}
            line |= {"max_attention_logit": max(self._logits), "layer_attention_logit": of_layers}
        line |= {} if metrics.squares is None else sizes_of(metrics.squares, self._elements)
        line |= self._of_layers
        self._begin()
        return line

    def medians(self) -> Record:
        """The speed of this start's steps without the first, one by one; empty where there is no other."""
        names = "median_tokens_per_s", "median_step_time_s"
        return dict(zip(names, map(statistics.median, zip(*self._speeds, strict=True)), strict=False))

    def compare_ranks(self, log: RunLog, hosts: Sequence[str], step: int) -> None:
        """Record peak memory in GiB and seconds of computing in a step by rank, and which ranks are slow.

        All ranks call it after the same step: one small all-gather on the host. A rank that takes much longer than half
        of its stage has a reason of its own (a hot device, a busy host), and slows all of its tensor-parallel group.
        """
        context = self._context
        own = statistics.median([sum(split[part] for part in OWN) for split in self._splits] or [0.0])
        gathered = context.gather_json([round(memory_gib(context.device), 3), round(own, 6)])
        memory, compute = ([found[at] for found in gathered] for at in (0, 1))
        log.event("ranks", step, memory_gib=memory, compute_s=compute)
        stages = [context.layout.coordinates(rank)["pp"] for rank in range(context.world_size)]
        for rank, times in stragglers(compute, stages).items() if len(self._splits) >= FEWEST else ():
            lost_s, step_s = compute[rank] * (1 - 1 / times), statistics.median(sum(it.values()) for it in self._splits)
            words = {"times": round(times, 2), "share": round(lost_s / step_s, 3), "host": hosts[rank]}
            log.event("straggler", step, rank=rank, **words)


def stragglers(compute_s: Sequence[float], stages: Sequence[int]) -> dict[int, float]:
    """Ranks that take more than SLOW times the (lower) median of the ranks of their stage, and how many times as long.
    `stages`: the pipeline rank of each rank."""
    ranks = [*zip(compute_s, stages, strict=True)]
    usual = {stage: statistics.median_low([each for each, at in ranks if at == stage]) or inf for stage in {*stages}}
    return {rank: times for rank, (each, at) in enumerate(ranks) if (times := each / usual[at]) > SLOW}


def memory_gib(device: torch.device) -> float:
    """Peak memory of this rank so far: of the accelerator's allocator, on a CPU of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / (1 << 30)
    unit = 1 if sys.platform == "darwin" else 1 << 10  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / (1 << 30)

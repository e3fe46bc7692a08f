"""The pipeline's executor beside what its schedule promises and beside torch's, on two ranks of one thread each.

What is promised: the simulator's step for the times that the actions themselves took. torch.distributed.pipelining's
Schedule1F1B runs the very same stages, to the same losses and gradients, in turns inside the same processes, so that
whatever else the machine does hits all. A step is forward and backward of a batch of 8 microbatches; no optimizer.

    python benchmarks/benchmark.py --pipeline                       both shapes, fp32 and bf16
    python benchmarks/benchmark.py --pipeline --model tiny --precision fp32 --steps 20
"""

import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from figures import write_figures
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore  # torch.distributed exports it, but not to type checkers
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.multiprocessing.spawn import spawn

from megalite.config.compose import load_config
from megalite.config.schedule_request import ScheduleRequest
from megalite.config.schema import Config
from megalite.data.batch import Batch, whole_batch
from megalite.launch.context import ParallelContext
from megalite.launch.device import DTYPES
from megalite.launch.startup import join
from megalite.layout.ranks import ParallelLayout
from megalite.model.flops import parameter_count
from megalite.model.gpt import GPT
from megalite.pipeline.actions import ActionKind, parse_action
from megalite.pipeline.schedules import build_schedule
from megalite.pipeline.simulator import Durations, Span
from megalite.plan.timeline import Timeline, simulated
from megalite.train.build import Training, build_training, fill_with_start_values, needs_of

RANKS = 2
MICROBATCHES = 8
WARM_UP_STEPS = 2
MOST_OF_PREDICTION = 1.10
SCHEDULES = {"1f1b": 1, "zb-h1": 1, "interleaved": 2}  # and chunks of a rank
OURS, PEER = "megalite 1f1b", "torch Schedule1F1B"
ROUNDING = {"fp32": 1e-5, "bf16": 1e-2}  # how far losses and gradients may lie apart, relative to the largest


@dataclass(frozen=True)
class Shape:
    """A model and its sequence length as overrides, and the sequences of a microbatch."""

    overrides: tuple[str, ...]
    batch: int = 1

    def config(self, precision: str, schedule: str, batch: int | None = None) -> Config:
        """megalite's resolved configuration for RANKS ranks."""
        batch = batch or self.batch
        sizes = [f"train.global_batch_size={MICROBATCHES * batch}", f"train.micro_batch_size={batch}"]
        fixed = [f"precision={precision}", "device=cpu", "tokenizer=byte", "train.compile=false"]
        stages = [f"parallel.pp={RANKS}", f"parallel.vpp={SCHEDULES[schedule]}", f"parallel.schedule={schedule}"]
        return load_config([*self.overrides, *sizes, *fixed, *stages], RANKS)


SHAPES = {
    "tiny": Shape(("model=tiny", "model.vocab_size=4096", "train.seq_length=256")),
    "wide": Shape(("model=gpt2", "model.num_layers=4", "model.vocab_size=8192", "train.seq_length=128")),
}


# --- who runs --------------------------------------------------------------------------------------------------------


class Contender(Protocol):
    """One way to bring a batch through the pipeline on this rank."""

    training: Training

    def step(self) -> float:
        """Forward and backward of all microbatches. The sum of their losses, 0 where the loss is not."""


class Megalite:
    """The executor of a run."""

    def __init__(self, config: Config, context: ParallelContext, batches: Sequence[Batch]) -> None:
        context = replace(context, layout=ParallelLayout(pp=RANKS, vpp=config.parallel.vpp))
        self.training = build_training(config, context)
        fill_with_start_values(self.training.buffers, config, context)
        self._batches, self._scale = batches, scale_of(batches)
        self.spans: list[Span] = []  # of the last step

    def step(self) -> float:
        with self.training.executor.recording() as self.spans:
            return self.training.executor.forward_backward(self._batches, self._scale).item()


class _Stage(nn.Module):
    """torch's stages exchange tensors: a part of the model, its batch made of them. The last one gives the loss."""

    def __init__(self, part: GPT, like: Batch, scale: Tensor) -> None:
        super().__init__()
        self._part, self._like, self._scale = part, like, scale

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Tokens [b, s] or what the stage before sent -> what the next one receives, or the loss [1]."""
        if labels is not None:
            return self._part.loss(replace(self._like, labels=labels), self._scale, x).view(1)
        out: Tensor = self._part(replace(self._like, tokens=x))
        return out


class Torch:
    """Schedule1F1B around the same stages: those that the executor of a contender runs, with their buffers."""

    def __init__(self, training: Training, context: ParallelContext, batches: Sequence[Batch]) -> None:
        self.training, self._rank = training, context.rank
        stage = _Stage(training.chunks[0], batches[0], scale_of(batches))
        pipeline = PipelineStage(stage, context.rank, RANKS, context.device, group=context.group("world"))
        self._schedule = Schedule1F1B(pipeline, MICROBATCHES, loss_fn=lambda loss, _: loss.sum(), scale_grads=False)
        self._tokens = torch.cat([batch.tokens for batch in batches])
        self._labels = torch.cat([batch.labels for batch in batches])

    def step(self) -> float:
        if self._rank == 0:
            self._schedule.step(self._tokens, return_outputs=False)
            return 0.0
        losses: list[Tensor] = []
        self._schedule.step(target=self._labels, losses=losses, return_outputs=False, labels=self._labels)
        return torch.stack(losses).sum().item()


def scale_of(batches: Sequence[Batch]) -> Tensor:
    return 1 / torch.stack([batch.loss_mask.sum() for batch in batches]).sum()


def random_batches(config: Config) -> list[Batch]:
    """The batch of the ranks, the same in every step."""
    assert config.train.micro_batch_size is not None
    shape = (config.train.micro_batch_size, config.train.seq_length)
    generator = torch.Generator().manual_seed(config.seed)
    mask, positions = torch.ones(shape, dtype=torch.bool), torch.arange(shape[1]).expand(shape)
    drawn = (torch.randint(0, config.model.vocab_size or 0, shape, generator=generator) for _ in range(MICROBATCHES))
    return [whole_batch(tokens, tokens.roll(-1, dims=1), mask, positions, None, 0) for tokens in drawn]


# --- the comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step on one rank: seconds on the clock that all processes of a machine share; `actions` as in a recording."""

    begin: float
    end: float
    actions: list[tuple[str, float, float]]


@dataclass(frozen=True)
class Measured:
    """One contender on one rank."""

    loss: float
    gradient: list[float]  # sum of squares of each bucket, after a step
    steps: list[Step]


def measure(context: ParallelContext, configs: dict[str, Config], rounds: int) -> dict[str, Measured]:
    """Let all contenders compute a step, then time them in turns."""
    sides: dict[str, Contender] = {}
    for schedule, config in configs.items():
        batches = random_batches(config)
        sides[f"megalite {schedule}"] = ours = Megalite(config, context, batches)
        if schedule == "1f1b":
            sides[PEER] = Torch(ours.training, context, batches)
    for side in sides.values():  # torch's stages, too, run something on their own before their first step
        for _ in range(WARM_UP_STEPS):
            side.step()
    found, names = {name: counted_step(side) for name, side in sides.items()}, list(sides)
    for number in range(rounds):
        first = number % len(names)  # nobody always follows the same one
        for name in names[first:] + names[:first]:
            side = sides[name]
            context.barrier()
            begin = time.perf_counter()
            side.step()
            end = time.perf_counter()
            spans = side.spans if isinstance(side, Megalite) else []
            found[name].steps.append(Step(begin, end, [(str(action), start, end) for action, start, end in spans]))
    return found


def counted_step(side: Contender) -> Measured:
    """Loss and gradients of a contender."""
    side.training.buffers.start_step()
    loss = side.step()
    side.training.sync.finish()
    return Measured(loss, [float(part.double().square().sum()) for part in side.training.buffers.gradients], [])


@dataclass(frozen=True)
class Comparison:
    """One shape in one precision, every contender on every rank."""

    model: str
    precision: str
    parameters: int
    measured: dict[str, list[Measured]]

    @property
    def faults(self) -> list[str]:
        """Why it is worth nothing; empty where all is well."""
        found, near = [], ROUNDING[self.precision]
        expected = self.measured[OURS]
        loss, norm = expected[-1].loss, self._squares(OURS)
        for name, ranks in self.measured.items():
            if not abs(ranks[-1].loss / loss - 1) <= near:
                found.append(f"{name} does other work: its loss is {ranks[-1].loss}, not {loss}")
            if not abs(self._squares(name) / norm - 1) <= 2 * near:
                found.append(f"{name} does other work: its gradients' squares are {self._squares(name)}, not {norm}")
        return found

    @property
    def aims(self) -> list[str]:
        """The bound that the executor must keep, and whether it did here."""
        cost, peer = self.by_prediction(OURS), self.by_peer(OURS)
        return [
            f"1f1b at most {MOST_OF_PREDICTION} of its prediction: {_reached(cost <= MOST_OF_PREDICTION)} ({cost:.3f})",
            f"1f1b faster than torch's Schedule1F1B: {_reached(peer < 1)} ({peer:.3f})",
        ]

    def milliseconds(self, name: str) -> float:
        """Milliseconds of a step, from the first rank's begin to the last rank's end; the median over the rounds."""
        return 1e3 * statistics.median(self._seconds(name))

    def by_prediction(self, name: str) -> float:
        """Megalite's measured step by the simulated one with the mean times of that step's actions; the median."""
        pairs = zip(self._seconds(name), self.predicted(name), strict=True)
        return statistics.median(seconds / predicted.makespan for seconds, predicted in pairs)

    def by_peer(self, name: str) -> float:
        """A contender's step by that of torch's schedule in the same round; the median."""
        return statistics.median(a / b for a, b in zip(self._seconds(name), self._seconds(PEER), strict=True))

    def predicted(self, name: str) -> list[Timeline]:
        """The simulator's, of every step."""
        schedule = name.removeprefix("megalite ")
        table = build_schedule(ScheduleRequest(schedule, RANKS, MICROBATCHES, SCHEDULES[schedule]))
        found = []
        for steps in zip(*(rank.steps for rank in self.measured[name]), strict=True):
            spans = tuple(tuple(Span(parse_action(cell), *times) for cell, *times in step.actions) for step in steps)
            found.append(simulated(table, mean_durations(spans)))
        return found

    def _seconds(self, name: str) -> list[float]:
        steps = zip(*(rank.steps for rank in self.measured[name]), strict=True)
        return [max(step.end for step in ranks) - min(step.begin for step in ranks) for ranks in steps]

    def _squares(self, name: str) -> float:
        return sum(sum(rank.gradient) for rank in self.measured[name])


def mean_durations(ranks: Sequence[Sequence[Span]]) -> Durations:
    """The mean time of each kind of action on each chunk of each rank."""
    times = defaultdict[tuple[int, int, ActionKind], list[float]](list)
    for rank, spans in enumerate(ranks):
        for action, start, end in spans:
            times[rank, action.chunk, action.kind].append(end - start)
    return {key: statistics.fmean(values) for key, values in times.items()}


def _reached(yes: bool) -> str:
    return "yes" if yes else "no, in this run"


def table(comparison: Comparison) -> str:
    """A line for each contender."""
    rows = [["", "ms/step", "by the simulator", "by it", "by torch's 1f1b", "idle, simulated"]]
    for name in comparison.measured:
        rows.append([name, f"{comparison.milliseconds(name):.1f}"])
        if name == PEER:
            rows[-1] += ["-", "-", "1.00", "-"]
            continue
        predicted = comparison.predicted(name)
        rows[-1] += [f"{1e3 * statistics.median(each.makespan for each in predicted):.1f}"]
        rows[-1] += [f"{comparison.by_prediction(name):.3f}", f"{comparison.by_peer(name):.3f}"]
        bubble = statistics.median(each.bubble for each in predicted)
        rows[-1] += [f"{bubble / (1 + bubble):.1%}"]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def compare(name: str, configs: dict[str, Config], rounds: int) -> Comparison:
    """Start the ranks, let them measure."""
    config = configs["1f1b"]
    with tempfile.TemporaryDirectory(prefix="megalite-benchmark-") as folder:
        spawn(_run_rank, (folder, configs, rounds), nprocs=RANKS)
        by_rank = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    measured = {side: [_read(rank[side]) for rank in by_rank] for side in by_rank[0]}
    return Comparison(name, config.precision, parameter_count(config.model), measured)


def _read(fields: dict[str, Any]) -> Measured:
    return Measured(**{**fields, "steps": [Step(**step) for step in fields["steps"]]})


def _run_rank(rank: int, folder: str, configs: dict[str, Config], rounds: int) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder, "store")), RANKS)
    config = configs["1f1b"]
    layout, dtype = ParallelLayout(pp=RANKS), DTYPES[config.precision]
    context = join(ParallelContext(layout, rank, dtype=dtype, store=store), timeout_s=600, needs=needs_of(config))
    measured = measure(context, configs, rounds)
    context.barrier()
    context.close()
    Path(folder, f"{rank}.json").write_text(json.dumps({name: asdict(each) for name, each in measured.items()}))


def run(names: Sequence[str], precisions: Sequence[str], *, rounds: int, batch: int | None, file: Path | None) -> int:
    """Compare, print and judge: the exit status is 1 where contenders do different work."""
    comparisons = []
    for name, precision in itertools.product(names, precisions):
        configs = {schedule: SHAPES[name].config(precision, schedule, batch) for schedule in SCHEDULES}
        comparison = compare(name, configs, rounds)
        size = f"{comparison.parameters / 1e6:.1f}M parameters"
        print(f"\n{name} {precision}: {size}, pp {RANKS}, {MICROBATCHES} microbatches, one thread each")
        print(table(comparison))
        verdict = "\n".join(f"wrong: {fault}" for fault in comparison.faults)
        print(verdict or "losses and gradients agree")
        print(*comparison.aims, sep="\n", flush=True)
        comparisons.append(comparison)
    if file is not None:
        write_figures(file, [asdict(comparison) for comparison in comparisons])
    return int(any(comparison.faults for comparison in comparisons))

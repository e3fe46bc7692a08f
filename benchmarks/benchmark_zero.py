"""ZeRO-1 beside what torch has for it: step time and bytes sent of data-parallel ranks on gloo, one thread each.

Everyone trains the same GPT from the same start values on the same tokens with the same clipping and AdamW, and their
losses must agree: a comparison of different work is refused. They take turns inside the same processes, so that
whatever else the machine does hits all. A turn ends when the parameters are whole again: what megalite leaves under way
for the next forward counts as well.

    python benchmarks/benchmark.py --zero                       both shapes, fp32
    python benchmarks/benchmark.py --zero --model wide --precision bf16 --steps 20
"""

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from benchmark_bytes import Primitives, bytes_by_formula, bytes_on_the_wire
from figures import write_figures
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore  # torch.distributed exports it, but not to type checkers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from megalite.config.compose import load_config
from megalite.config.schema import Config
from megalite.data.batch import Batch, whole_batch
from megalite.launch.context import ParallelContext
from megalite.launch.device import DTYPES
from megalite.launch.startup import join
from megalite.layout.ranks import ParallelLayout
from megalite.model.flops import parameter_count
from megalite.model.gpt import GPT
from megalite.model.init import start_values
from megalite.model.parameters import gpt_parameters
from megalite.train.build import build_training, fill_with_start_values, needs_of
from megalite.train.step import TrainStep

RANKS = 2
LEARNING_RATE = 1e-4
FIRST_STEPS = 5  # not timed: their losses are compared, the last one's bytes counted
TURN_STEPS = 3
ROUNDING = {"fp32": 1e-5, "bf16": 5e-3}  # how far losses may lie apart, relative
NORM_ROUNDING = {"fp32": 1e-3, "bf16": 2e-2}  # and gradient norms: torch's CPU kernel adds squares in a few fp32 sums

HEADERS = 1.01  # gloo's, of its messages
OTHER_BYTES = 4096  # the step's figures and the barrier after it

OURS = "megalite zero=1"
PEERS = {"DDP + ZeroRedundancyOptimizer", "FSDP2"}  # those that shard the optimizer's state


@dataclass(frozen=True)
class Shape:
    """A model and its sequence length as overrides, and the sequences of each rank's step."""

    overrides: tuple[str, ...]
    batch: int

    def config(self, precision: str, batch: int | None = None) -> Config:
        """megalite's resolved configuration for RANKS ranks."""
        batch = batch or self.batch
        sizes = [f"train.global_batch_size={RANKS * batch}", f"train.micro_batch_size={batch}"]
        fixed = [f"precision={precision}", "device=cpu", "tokenizer=byte", "train.compile=false"]
        return load_config([*self.overrides, *sizes, *fixed], RANKS)


SHAPES = {
    "tiny": Shape(("model=tiny", "model.vocab_size=4096", "train.seq_length=256"), 2),
    "wide": Shape(("model=gpt2", "model.num_layers=4", "model.vocab_size=8192", "train.seq_length=256"), 1),
}


# --- who trains ------------------------------------------------------------------------------------------------------


class Contender(Protocol):
    """One way to train the model of a config on this rank's batch."""

    def step(self) -> float:
        """One step; the loss, whose mean over the ranks is that of the global batch."""

    def grad_norm(self) -> float:
        """The gradient norm of the last step over all ranks; collective."""

    def settle(self) -> None:
        """Return when every rank has the parameters for its next forward."""


class Megalite:
    """The training step of a run."""

    def __init__(self, config: Config, context: ParallelContext, batch: Batch, *, zero: int) -> None:
        config = replace(config, optimizer=replace(config.optimizer, zero=zero))
        self.training = build_training(config, context)
        self.comm_dtype = DTYPES[config.optimizer.communication_dtype or config.optimizer.gradient_dtype]
        fill_with_start_values(self.training.buffers, config, context)
        self._train = TrainStep(self.training, config.optimizer, context)
        self._batch, self._tokens = batch, int(batch.loss_mask.sum())
        self._norm = 0.0

    def step(self) -> float:
        figures = self._train([self._batch], self._tokens, LEARNING_RATE).read()
        self._norm = figures.grad_norm
        return figures.loss

    def grad_norm(self) -> float:
        return self._norm

    def settle(self) -> None:
        self.training.gather.finish()


class _Loss(nn.Module):
    """torch's wrappers work in `forward`: the mean loss of a batch."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, scale: Tensor) -> Tensor:
        return self.model.loss(batch, scale)


class Torch:
    """The loop that one writes by hand around a wrapped model: autograd's gradients, torch's clipping and AdamW."""

    def __init__(
        self,
        config: Config,
        batch: Batch,
        dtype: torch.dtype,
        wrap: Callable[[GPT], nn.Module],
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        model = GPT(config, dtype=dtype, device=torch.device("cpu")).float()
        records = gpt_parameters(config.model)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in start_values(records, config.seed):
                parameters[name].copy_(value)
        self._model = wrap(model)
        parameters = dict(model.named_parameters())  # FSDP2's are others
        settings = config.optimizer
        self._parameters = list(parameters.values())
        self._optimizer = optimizer(
            [
                {"params": [parameters[each.name] for each in records if each.decay == decay], "weight_decay": weight}
                for decay, weight in ((True, settings.weight_decay), (False, 0.0))
            ],
            lr=LEARNING_RATE,
            betas=tuple(settings.betas),
            eps=settings.eps,
            fused=True,
        )
        self._clip = settings.clip_grad
        self._batch, self._scale = batch, 1 / batch.loss_mask.sum()  # every rank has as many tokens
        self._norm = torch.zeros(())

    def step(self) -> float:
        loss: Tensor = self._model(self._batch, self._scale)
        loss.backward()
        self._norm = nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def grad_norm(self) -> float:
        return (self._norm.full_tensor() if isinstance(self._norm, DTensor) else self._norm).item()

    def settle(self) -> None:
        """Nothing is under way after a step."""


def _ddp(model: GPT) -> nn.Module:
    wrapped: nn.Module = DistributedDataParallel(_Loss(model), gradient_as_bucket_view=True)
    return wrapped


def _fsdp(model: GPT) -> nn.Module:
    """Parameters stay whole until backward is over, which sends no more than ZeRO-1."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    narrow = None if model.dtype == torch.float32 else model.dtype
    precision = MixedPrecisionPolicy(narrow, torch.float32, cast_forward_inputs=False)
    whole = _Loss(model)
    for part in (*model.blocks.values(), whole):
        fully_shard(part, mesh=mesh, reshard_after_forward=False, mp_policy=precision)
    return whole


def _zero_redundancy(groups: Any, **settings: Any) -> torch.optim.Optimizer:
    """Torch's ZeRO optimizer without overlap: with overlap there is no place for clipping."""
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=True, **settings)


def contenders(config: Config, context: ParallelContext, batch: Batch) -> dict[str, Contender]:
    """Contenders by name. In bf16 all keep fp32 masters and sum gradients in fp32, as megalite does."""
    found: dict[str, Contender] = {OURS: Megalite(config, context, batch, zero=1)}
    found["megalite zero=0"] = Megalite(config, context, batch, zero=0)
    found["FSDP2"] = Torch(config, batch, context.dtype, _fsdp)
    if context.dtype == torch.float32:
        found["DDP + ZeroRedundancyOptimizer"] = Torch(config, batch, context.dtype, _ddp, _zero_redundancy)
        found["DDP + AdamW"] = Torch(config, batch, context.dtype, _ddp)
    return found


# --- the comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One contender on one rank."""

    losses: list[float]  # of the first steps
    norm: float  # of the gradient, in the last of them
    on_the_wire: int  # bytes of one step
    sent: int | None  # the same at the primitives, megalite's alone
    formula: int | None  # what these should be
    wall: list[float]  # seconds of one step, the mean of each turn
    processor: list[float]  # gloo's threads included


def measure(context: ParallelContext, config: Config, rounds: int) -> dict[str, Measured]:
    """All contenders on this rank. All ranks must call it."""
    sides = contenders(config, context, random_batch(config, context.rank))
    found = {name: first_steps(side, context) for name, side in sides.items()}
    names = list(sides)
    for number in range(rounds):
        first = number % len(names)  # nobody always follows the same one
        for name in names[first:] + names[:first]:
            context.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            for _ in range(TURN_STEPS):
                sides[name].step()
            sides[name].settle()
            context.barrier()
            found[name].wall.append((time.perf_counter() - wall) / TURN_STEPS)
            found[name].processor.append((time.process_time() - processor) / TURN_STEPS)
    return found


def first_steps(side: Contender, context: ParallelContext) -> Measured:
    """Losses of a contender, and the bytes of the last one."""
    losses = [side.step() for _ in range(FIRST_STEPS - 1)]
    side.settle()
    context.barrier()
    before, primitives = bytes_on_the_wire(), Primitives()
    with primitives.counted():
        losses.append(side.step())
        side.settle()
    context.barrier()
    on_the_wire = bytes_on_the_wire() - before
    sent = formula = None
    if isinstance(side, Megalite):
        sent, formula = primitives.sent, bytes_by_formula(side.training, side.comm_dtype)
    return Measured(losses, side.grad_norm(), on_the_wire, sent, formula, [], [])


def random_batch(config: Config, rank: int) -> Batch:
    """The batch of this rank, the same in every step."""
    assert config.train.micro_batch_size is not None
    shape = (config.train.micro_batch_size, config.train.seq_length)
    generator = torch.Generator().manual_seed(config.seed + rank)
    tokens = torch.randint(0, config.model.vocab_size or 0, shape, generator=generator)
    positions = torch.arange(shape[1]).expand(shape)
    return whole_batch(tokens, tokens.roll(-1, dims=1), torch.ones(shape, dtype=torch.bool), positions, None, 0)


@dataclass(frozen=True)
class Comparison:
    """One shape in one precision, every contender on every rank."""

    model: str
    precision: str
    parameters: int
    measured: dict[str, list[Measured]]

    @property
    def faults(self) -> list[str]:
        """Why it is worth nothing, or what it disproves; empty where all is well."""
        found = []
        expected, norm = self._losses(OURS), self.measured[OURS][0].norm
        for name, ranks in self.measured.items():
            losses = self._losses(name)
            if not all(abs(a / b - 1) <= ROUNDING[self.precision] for a, b in zip(losses, expected, strict=True)):
                found.append(f"{name} does other work: its losses are {losses}, not {expected}")
            for rank, each in enumerate(ranks):
                if not abs(each.norm / norm - 1) <= NORM_ROUNDING[self.precision]:
                    found.append(
                        f"{name} does other work: its gradient's norm is {each.norm} on rank {rank}, not {norm}"
                    )
                if each.formula is None:
                    continue
                beside = f"bytes from rank {rank}, {each.formula} by the formula"
                if each.sent != each.formula:
                    found.append(f"{name}: {each.sent} {beside}")
                if not each.formula <= each.on_the_wire <= HEADERS * each.formula + OTHER_BYTES:
                    found.append(f"{name}: over TCP {each.on_the_wire} {beside}")
        return found

    def milliseconds(self, name: str) -> float:
        """Milliseconds of a step, the median over the rounds."""
        return 1e3 * statistics.median(self._wall(name))

    def processor_milliseconds(self, name: str) -> float:
        """Processor time of a step, all ranks together; the median over the rounds."""
        return 1e3 * statistics.median(self._processor(name))

    def ours_by_it(self, name: str) -> tuple[float, float]:
        """Time and processor time of megalite's ZeRO-1 by its: medians over the rounds."""
        ratios = [
            [own / other for own, other in zip(times(OURS), times(name), strict=True)]
            for times in (self._wall, self._processor)
        ]
        return statistics.median(ratios[0]), statistics.median(ratios[1])

    def fastest_peer(self) -> str:
        """The fastest peer that shards the optimizer's state."""
        return max(PEERS & self.measured.keys(), key=lambda name: self.ours_by_it(name)[0])

    def _losses(self, name: str) -> list[float]:
        return [statistics.mean(losses) for losses in zip(*(each.losses for each in self.measured[name]), strict=True)]

    def _wall(self, name: str) -> list[float]:
        return [max(walls) for walls in zip(*(each.wall for each in self.measured[name]), strict=True)]

    def _processor(self, name: str) -> list[float]:
        return [sum(spent) for spent in zip(*(each.processor for each in self.measured[name]), strict=True)]


def table(comparison: Comparison) -> str:
    """A line for each contender: its step, megalite's ZeRO-1 by it, and what a rank sends in a step."""
    rows = [["", "ms/step", "zero=1 by it", "processor ms", "zero=1 by it", "MB sent", "by formula"]]
    for name, ranks in comparison.measured.items():
        time_ratio, processor_ratio = comparison.ours_by_it(name)
        rows.append([name, f"{comparison.milliseconds(name):.1f}", f"{time_ratio:.2f}"])
        rows[-1] += [f"{comparison.processor_milliseconds(name):.1f}", f"{processor_ratio:.2f}"]
        formula = ranks[0].formula
        rows[-1] += [f"{ranks[0].on_the_wire / 1e6:.2f}", "-" if formula is None else f"{formula / 1e6:.2f}"]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def compare(name: str, config: Config, rounds: int) -> Comparison:
    """Start the ranks, let them measure."""
    with tempfile.TemporaryDirectory(prefix="megalite-benchmark-") as folder:
        spawn(_run_rank, (folder, config, rounds), nprocs=RANKS)
        by_rank = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    measured = {side: [Measured(**rank[side]) for rank in by_rank] for side in by_rank[0]}
    return Comparison(name, config.precision, parameter_count(config.model), measured)


def _run_rank(rank: int, folder: str, config: Config, rounds: int) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder, "store")), RANKS)
    dtype = DTYPES[config.precision]
    layout = ParallelLayout(dp=RANKS)
    context = join(ParallelContext(layout, rank, dtype=dtype, store=store), timeout_s=600, needs=needs_of(config))
    measured = measure(context, config, rounds)
    context.barrier()
    context.close()
    Path(folder, f"{rank}.json").write_text(json.dumps({name: asdict(each) for name, each in measured.items()}))


def run(names: Sequence[str], precisions: Sequence[str], *, rounds: int, batch: int | None, file: Path | None) -> int:
    """Compare, print and judge: the exit status is 1 where contenders do different work or bytes differ."""
    comparisons = []
    for name, precision in itertools.product(names, precisions):
        comparison = compare(name, SHAPES[name].config(precision, batch), rounds)
        peer = comparison.fastest_peer()
        millions, ratio = comparison.parameters / 1e6, comparison.ours_by_it(peer)[0]
        print(f"\n{name} {precision}: {millions:.1f}M parameters, {RANKS} ranks, one thread each\n{table(comparison)}")
        print(f"megalite zero=1 takes {ratio:.2f} x the time of the fastest peer, {peer}")
        verdict = "\n".join(f"wrong: {fault}" for fault in comparison.faults)
        print(verdict or "losses and gradient norms agree, bytes are the formula's", flush=True)
        comparisons.append(comparison)
    if file is not None:
        write_figures(file, [asdict(comparison) for comparison in comparisons])
    return int(any(comparison.faults for comparison in comparisons))

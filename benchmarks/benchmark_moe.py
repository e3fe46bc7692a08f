"""Experts: where a layer of them spends its time, and expert parallelism beside data parallelism on two ranks.

The layer is measured on the inputs that it has in a training step. The ranks have one thread each; all contenders train
the same model on the same global batch, in turns, and their losses must agree. Each has processes of its own.

    python benchmarks/benchmark.py --experts                    tiny_moe, fp32 and bf16
    python benchmarks/benchmark.py --experts --precision bf16 --steps 20
"""

import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import benchmark_sides
import torch
from benchmark_sides import Megalite, Shape, environment_kept, seconds_of
from figures import write_figures
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore  # torch.distributed exports it, but not to type checkers

from megalite.config.schema import Config
from megalite.context_parallel import exchange
from megalite.launch.environment import set_variables
from megalite.launch.process import ProcessEnvironment
from megalite.moe import balance, dispatch
from megalite.moe.layer import MoELayer
from megalite.train.build import open_context

RANKS = 2
TURN_STEPS = 3
FIXED = ("train.compile=false", "model.moe.aux_loss=sequence")  # a loss of microbatches has other ones in each layout
SHAPES = {"tiny_moe": benchmark_sides.SHAPES["tiny_moe"]}
REFERENCE = "dp 2"
Contenders = Mapping[str, tuple[int, tuple[str, ...]]]
CONTENDERS: Contenders = {  # ranks with sequences of their own, overrides
    REFERENCE: (2, ()),
    "ep 2, alltoall": (2, ("parallel.ep=2",)),
    "ep 2, allgather": (2, ("parallel.ep=2", "model.moe.dispatcher=allgather")),
    "tp 2": (1, ("parallel.tp=2",)),
    "tp 2, capacity 1.25": (1, ("parallel.tp=2", "model.moe.capacity_factor=1.25")),
}
DROPS = "tp 2, capacity 1.25"  # which is another function
ROUNDING = {"fp32": 1e-5, "bf16": 5e-3}  # how far losses may lie apart, relative
PROCESSES = multiprocessing.get_context("spawn")


# --- one layer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of forward and backward of one layer and, of these, of its experts."""

    layer: list[float] = field(default_factory=list)
    experts: list[float] = field(default_factory=list)

    @property
    def around_experts(self) -> float:
        """Share of routing, and of bringing rows to experts and back; median over the rounds."""
        return statistics.median(1 - part / whole for whole, part in zip(self.layer, self.experts, strict=True))


def measure_layer(config: Config, rounds: int) -> LayerTimes:
    """The first layer of `config`, on the inputs that it has in a training step of one process."""
    context = open_context(config, ProcessEnvironment())
    side = Megalite(config, context, global_tokens(config).to(context.device))
    layer = next(module for module in side.training.chunks[0].modules() if isinstance(module, MoELayer))
    inputs: dict[nn.Module, tuple[Any, ...]] = {}
    with ExitStack() as hooks:
        for module in (layer, layer.experts):
            handle = module.register_forward_pre_hook(lambda module, args: inputs.__setitem__(module, args))
            hooks.callback(handle.remove)
        side.step()
    found = LayerTimes()
    whole, experts = (forward_backward(module, inputs[module]) for module in (layer, layer.experts))
    for _ in range(rounds):
        found.layer.append(seconds_of(whole, TURN_STEPS, context.device))
        found.experts.append(seconds_of(experts, TURN_STEPS, context.device))
    return found


def forward_backward(module: nn.Module, inputs: Sequence[Any]) -> Callable[[], None]:
    """Both passes of `module`, with gradients of all inputs and parameters."""
    inputs = [
        each.detach().requires_grad_() if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in inputs
    ]

    def run() -> None:
        outputs = module(*inputs)
        output: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        output.backward(torch.ones_like(output))

    return run


# --- two ranks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One step of one rank, means over a turn: seconds, and of them those spent waiting for other ranks in layers."""

    loss: float
    seconds: float
    for_counts: float  # of the rows that will come: the host's wait
    for_rows: float
    for_choices: float  # gathered over a divided sequence: for capacities


class Ranks:
    """The processes that train one configuration, when they are asked to."""

    def __init__(self, config: Config, store: Path) -> None:
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            connection, other_end = PROCESSES.Pipe()
            process = PROCESSES.Process(target=_take_turns, args=(other_end, rank, str(store), config), daemon=True)
            process.start()
            other_end.close()  # so that this end notices where the process is gone
            self._connections.append(connection)
            self._processes.append(process)

    def turn(self) -> list[Turn]:
        """The answers of all ranks. EOFError where a rank is gone, whose own words stand above."""
        for connection in self._connections:
            connection.send(None)
        return [connection.recv() for connection in self._connections]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _take_turns(connection: Connection, rank: int, store: str, config: Config) -> None:
    environment = ProcessEnvironment(rank, RANKS, rank, RANKS, launcher="env")
    context = open_context(config, environment, FileStore(store, RANKS))
    torch.set_num_threads(1)
    data_ranks = context.size("dp")
    side = Megalite(config, context, global_tokens(config).chunk(data_ranks)[rank % data_ranks])
    with Waits().counted() as waits:
        while True:
            connection.recv()
            context.barrier()
            waits.seconds.clear()
            begin = time.perf_counter()
            losses = [side.step().read().loss for _ in range(TURN_STEPS)]
            side.training.gather.finish()
            context.barrier()
            seconds = time.perf_counter() - begin
            found = [seconds, *(waits.seconds.get(name, 0.0) for name in ("counts", "rows", "choices"))]
            connection.send(Turn(losses[-1], *(each / TURN_STEPS for each in found)))


class Waits:
    """Seconds in which layers wait for what they have asked other ranks for: those with experts, and attention."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def counted(self) -> Iterator["Waits"]:
        with ExitStack() as stack:
            for module in (dispatch, balance, exchange):
                stack.enter_context(mock.patch.object(module, "finish", self._timed(module.finish, module is balance)))
            yield self

    def _timed(self, original: Callable[[Tensor], Tensor], choices: bool) -> Callable[[Tensor], Tensor]:
        def timed(x: Tensor) -> Tensor:
            begin = time.perf_counter()
            result = original(x)
            name = "choices" if choices else "rows" if x.is_floating_point() else "counts"
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            return result

        return timed


def global_tokens(config: Config) -> Tensor:
    """The batch of all ranks together, the same in every step."""
    shape = config.train.global_batch_size, config.train.seq_length
    generator = torch.Generator().manual_seed(config.seed)
    return torch.randint(0, config.model.vocab_size or 0, shape, generator=generator)


@dataclass(frozen=True)
class Comparison:
    """One precision: every contender's turns, by round and rank."""

    precision: str
    turns: dict[str, list[list[Turn]]]

    @property
    def faults(self) -> list[str]:
        """Why it is worth nothing; empty where all is well."""
        losses = {name: ranks[0].loss for name, (ranks, *_) in self.turns.items()}  # later a token may go elsewhere
        return [
            f"{name} does other work: its first loss is {loss}, not {losses[REFERENCE]}"
            for name, loss in losses.items()
            if name != DROPS and not abs(loss / losses[REFERENCE] - 1) <= ROUNDING[self.precision]
        ]

    def seconds(self, name: str) -> list[float]:
        """Seconds of a step on the slowest rank, by round."""
        return [max(turn.seconds for turn in ranks) for ranks in self.turns[name]]

    def speed(self, name: str, reference: str = REFERENCE) -> float:
        """Tokens per second by those of `reference`; median over the rounds."""
        return statistics.median(b / a for a, b in zip(self.seconds(name), self.seconds(reference), strict=True))

    def wait(self, name: str, of: str) -> float:
        """Share of the step; mean over ranks and rounds."""
        shares = [float(getattr(turn, of)) / turn.seconds for ranks in self.turns[name] for turn in ranks]
        return statistics.mean(shares)


def compare(
    shape: Shape,
    precision: str,
    rounds: int,
    batch: int,
    contenders: Contenders = CONTENDERS,
    fixed: Sequence[str] = FIXED,
) -> Comparison:
    """Start all contenders, let them train in turns. The first turn warms up."""
    with tempfile.TemporaryDirectory(prefix="megalite-benchmark-") as folder, ExitStack() as stack:
        sides: dict[str, Ranks] = {}
        for name, (data_ranks, overrides) in contenders.items():
            sizes = {"world_size": RANKS, "data_ranks": data_ranks}
            config = shape.config(batch, precision, torch.device("cpu"), *fixed, *overrides, **sizes)
            sides[name] = Ranks(config, Path(folder, f"store-{len(sides)}"))
            stack.callback(sides[name].close)
        for side in sides.values():
            side.turn()
        found: dict[str, list[list[Turn]]] = {name: [] for name in sides}
        names = list(sides)
        for number in range(rounds):
            first = number % len(names)  # nobody always follows the same one
            for name in names[first:] + names[:first]:
                found[name].append(sides[name].turn())
    return Comparison(precision, found)


def table(comparison: Comparison) -> str:
    """A line for each contender."""
    rows = [["", "ms/step", "speed by dp 2", "waits for counts", "for rows", "for choices"]]
    for name in comparison.turns:
        milliseconds = 1e3 * statistics.median(comparison.seconds(name))
        rows.append([name, f"{milliseconds:.1f}", f"{comparison.speed(name):.2f}"])
        rows[-1] += [f"{comparison.wait(name, of):.1%}" for of in ("for_counts", "for_rows", "for_choices")]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def run(names: Sequence[str], precisions: Sequence[str], *, rounds: int, batch: int | None, file: Path | None) -> int:
    """Measure, compare and print: the exit status is 1 where contenders do different work."""
    report, faults = [], []
    for name, precision in itertools.product(names, precisions):
        shape = SHAPES[name]
        config = shape.config(batch or shape.cpu_batch, precision, torch.device("cpu"), *FIXED)
        with environment_kept():
            set_variables(os.environ)  # as a run does before torch is imported
            with ProcessPoolExecutor(1, PROCESSES) as process:
                layer = process.submit(measure_layer, config, rounds).result()
        print(f"\n{name} {precision}, one layer, one process of {torch.get_num_threads()} threads")
        print(f"forward and backward {1e3 * statistics.median(layer.layer):.1f} ms; {layer.around_experts:.1%} of it")
        print("is not the experts' own: routing, moving and summing rows")
        comparison = compare(shape, precision, rounds, batch or shape.cpu_batch // RANKS)
        print(f"{name} {precision}, two ranks of one thread")
        print(table(comparison))
        print(f"capacity, by the same layout without: {comparison.speed(DROPS, 'tp 2'):.2f} of the speed")
        print("\n".join(f"wrong: {fault}" for fault in comparison.faults) or "losses agree", flush=True)
        report.append({"model": name, "layer": asdict(layer)} | asdict(comparison))
        faults += comparison.faults
    if file is not None:
        write_figures(file, report)
    return int(bool(faults))

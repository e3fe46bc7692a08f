"""Muon beside AdamW: what a step of several microbatches costs with each, in one process, in turns.

A step's forwards and backwards are the same work with both, so they are timed once a round, and the update of each
beside them. `ratio`: the step with Muon by that with AdamW.

    python benchmarks/benchmark.py --optimizer                  gpt2 and tiny_moe, 8 microbatches, fp32 and bf16
    python benchmarks/benchmark.py --optimizer --model gpt2 --precision bf16 --steps 5
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from benchmark_sides import SHAPES as SIDES
from benchmark_sides import Megalite, environment_kept
from figures import write_figures

from megalite.config.schema import Config
from megalite.launch.process import ProcessEnvironment
from megalite.train.build import derive_device, open_context

MICROBATCHES = 8
WARM_UP = 1
SHAPES = {name: SIDES[name] for name in ("gpt2", "tiny_moe")}


@dataclass(frozen=True)
class Cost:
    """Medians of a shape's steps, in seconds."""

    model: str
    precision: str
    adamw_s: float  # a step of MICROBATCHES with AdamW
    adamw_update_s: float
    muon_update_s: float

    @property
    def ratio(self) -> float:
        return (self.adamw_s - self.adamw_update_s + self.muon_update_s) / self.adamw_s


def costs(name: str, config: Config, rounds: int) -> Cost:
    """The cost of one shape; `config` is that of one microbatch with AdamW."""
    with environment_kept():
        context = open_context(config, ProcessEnvironment())
        config = derive_device(config, context)
        size = (config.train.micro_batch_size, config.train.seq_length)
        tokens = torch.randint(config.model.vocab_size or 0, size, generator=torch.Generator().manual_seed(0))
        sides = [
            Megalite(replace(config, optimizer=replace(config.optimizer, name=each)), context, tokens)
            for each in ("adamw", "muon")
        ]
        one, lr = torch.ones(()), torch.tensor(0.0, dtype=torch.float64)

        def update_s(side: Megalite) -> float:
            begin = time.perf_counter()
            side.training.optimizer.step(lr, divisor=one, skip=torch.zeros(()))
            return time.perf_counter() - begin

        def step_s() -> float:
            begin = time.perf_counter()
            sides[0].step(MICROBATCHES)
            return time.perf_counter() - begin

        taken = [(step_s(), *map(update_s, sides)) for _ in range(WARM_UP + rounds)][WARM_UP:]
    medians = [statistics.median(each) for each in zip(*taken, strict=True)]
    return Cost(name, config.precision, medians[0], medians[1], medians[2])


def run(shapes: Sequence[str], precisions: Sequence[str], *, rounds: int, batch: int | None, file: Path | None) -> int:
    """Print a line for each shape and precision."""
    found = []
    for name in shapes:
        for precision in precisions:
            shape = SHAPES[name]
            cost = costs(name, shape.config(batch or shape.cpu_batch, precision, torch.device("cpu")), rounds)
            found.append(cost)
            print(
                f"{name} {precision}: a step of {MICROBATCHES} microbatches {cost.adamw_s:.2f} s with AdamW, its update"
                f" {cost.adamw_update_s:.3f} s, Muon's {cost.muon_update_s:.3f} s; ratio {cost.ratio:.3f}",
                flush=True,
            )
    if file:
        write_figures(file, [{**asdict(cost), "ratio": cost.ratio} for cost in found])
    return 0

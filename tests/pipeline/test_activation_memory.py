"""What a pipeline rank holds at its peak, measured, is what its schedule says times what one microbatch leaves.

Counted is all that torch allocates on a real rank while it trains a batch, next to what one forward pass (and, where
weight gradients are put off, one backward-input) of one microbatch keeps when it runs alone. The model is deep: what
passes through a layer is small beside what all layers keep.
"""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from megalite.config.schema import Config
from megalite.data.batch import Batch
from megalite.launch.context import ParallelContext
from megalite.model.gpt import GPT
from megalite.pipeline.actions import Schedule, in_flight
from tests.optim.allocations import allocations_of
from tests.pipeline.shapes import schedule
from tests.pipeline.stages import microbatches, run_pipeline, stages_config, started

ONE = torch.ones(())
LAYERS = 8  # of a chunk
NEAR = 0.1  # how far the peak may be from the formula
Row = tuple[str, int]  # schedule, microbatches
Layout = tuple[int, int]  # pp, vpp
ROWS: dict[Layout, list[Row]] = {
    (2, 1): [("1f1b", 2), ("1f1b", 8), ("gpipe", 2), ("gpipe", 8), ("zb-h1", 5)],
    (4, 1): [("1f1b", 4), ("1f1b", 8), ("gpipe", 5), ("zb-h1", 6)],
    (2, 2): [("interleaved", 5)],
}


class Kept(NamedTuple):
    """Bytes that one microbatch leaves in a chunk: behind forward, its input included, and behind backward-input."""

    activation: int
    weights: int


Held = tuple[int, list[Kept]]  # bytes at the peak of a batch, and what a microbatch leaves in each chunk


@cache
def measured(layout: Layout) -> list[dict[Row, Held]]:
    """What each rank holds under each schedule of the layout."""
    (pp, vpp), rows = layout, ROWS[layout]
    sizes = {"hidden_size": 64, "num_layers": LAYERS * pp * vpp, "init_std": 0.02}
    config = stages_config(pp, rows[0][0], vpp, seq_length=64, **sizes)
    return run_pipeline(hold, config, rows, dtype=torch.float32)


def hold(context: ParallelContext, config: Config, rows: list[Row]) -> dict[Row, Held]:
    found = {}
    for name, count in rows:
        config.parallel.schedule = name
        training = started(context, config)
        batches = microbatches(config, count)
        training.executor.forward_backward(batches, ONE)  # .grad of norms and biases are there from now on

        def train() -> None:
            with record_function("batch"):
                training.executor.forward_backward(batches, ONE)  # noqa: B023  # called at once

        _, allocations = allocations_of(train)
        kept = [kept_by(chunk, batches[0]) for chunk in training.chunks]
        found[name, count] = allocations.peak("batch"), kept
    return found


def kept_by(chunk: GPT, batch: Batch) -> Kept:
    """Of a microbatch alone."""
    shape = chunk.activation_shape(batch)

    def forward() -> tuple[Any, GradientEdge]:
        received = None if chunk.embeds else torch.zeros(shape, dtype=chunk.dtype).requires_grad_()
        output = chunk.loss(batch, ONE, received) if chunk.has_loss else chunk(batch, received)
        return received, get_gradient_edge(output)

    (received, edge), allocations = allocations_of(forward)
    activation = allocations.left

    def backward() -> None:
        with chunk.deferred.collecting():
            torch.autograd.backward((edge,), (None if chunk.has_loss else torch.zeros(shape, dtype=chunk.dtype),))

    _, allocations = allocations_of(backward)
    # The input's own gradient is sent on, not kept. The input itself may be one that a product needs.
    sent = 0 if received is None else received.grad.nbytes
    chunk.deferred.run_next()
    return Kept(activation, activation + allocations.left - sent)


def expected_peak(schedule: Schedule, rank: int, kept: list[Kept]) -> int:
    """The most that the rank's actions hold at once."""
    held = peak = 0
    for kind, chunk, _ in schedule.ranks[rank]:
        activation, weights = kept[chunk].activation, kept[chunk].weights
        held += {
            "forward": activation,
            "backward": -activation,
            "backward-input": weights - activation,
            "backward-weight": -weights,
        }[kind]
        peak = max(peak, held)
    return peak


CASES = [  # a plain run measures the schedules of two ranks on four
    pytest.param(layout, row, marks=pytest.mark.long if layout == (2, 1) else ())
    for layout, rows in ROWS.items()
    for row in rows
]


@pytest.mark.parametrize(("layout", "row"), CASES, ids=str)
def test_a_rank_holds_what_its_schedule_says(layout: Layout, row: Row) -> None:
    (pp, vpp), (name, count) = layout, row
    table = schedule(name, pp, count, vpp)
    for rank, by_row in enumerate(measured(layout)):
        peak, kept = by_row[row]
        expected = expected_peak(table, rank, kept)
        if name in ("1f1b", "gpipe"):  # all activations are alike
            assert expected == in_flight(table.ranks[rank]) * kept[0].activation
        assert expected <= peak <= (1 + NEAR) * expected, f"rank {rank}"

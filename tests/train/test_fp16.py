"""fp16: the loss scale is found, what overflows is skipped on every rank, and what is told is the loss itself."""

from typing import Any, NamedTuple

import pytest
import torch

from megalite.data.batch import Batch, whole_batch
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import GroupNeeds, ParallelLayout
from megalite.train.build import Training, build_training, fill_with_start_values
from megalite.train.metrics import StepMetrics
from megalite.train.step import TrainStep
from tests.optim.small_model import small_config
from tests.ranks import run_ranks


class Seen(NamedTuple):
    """One step, the scale after it, and whether it changed any master."""

    step: StepMetrics
    next_scale: float
    changed: bool


def batch_of(number: int) -> Batch:
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(number))
    mask, positions = torch.ones(2, 8, dtype=torch.bool), torch.arange(8).expand(2, 8)
    return whole_batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, positions, None, 0)


def train(context: ParallelContext, steps: int, broken_rank: int | None, optimizer: dict[str, Any]) -> list[Seen]:
    """Two microbatches a step. `broken_rank` has an infinite gradient in the second step, alone."""
    config = small_config(optimizer=optimizer, parallel={"pp": context.layout.pp})
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    training.cast_and_gather_params()
    step = TrainStep(training, config.optimizer, context)
    seen = []
    for number in range(steps):
        before = [master.clone() for master in training.buffers.masters]
        if context.rank == broken_rank and number == 1:
            _break_once(training)
        batches = [batch_of(2 * context.index("dp") + microbatch) for microbatch in range(2)]
        metrics = step(batches, 32, 1e-2).read()
        changed = not all(map(torch.equal, before, training.buffers.masters))
        seen.append(Seen(metrics, 1.0 if training.loss_scale is None else float(training.loss_scale.state[0]), changed))
    training.gather.finish()
    return seen


def _break_once(training: Training) -> None:
    finish = training.sync.finish

    def and_spoil() -> None:
        training.buffers.gradient_buckets[0][:] = torch.inf
        training.sync.finish = finish  # type: ignore[method-assign]
        finish()

    training.sync.finish = and_spoil  # type: ignore[method-assign]


LAYOUTS = [ParallelLayout(dp=2), ParallelLayout(pp=2)]


def run(layout: ParallelLayout, *arguments: Any, dtype: torch.dtype = torch.float16) -> list[list[Seen]]:
    needs = GroupNeeds(tied_embeddings=True)
    return run_ranks(train, layout.world_size, *arguments, dtype=dtype, layout=layout, needs=needs)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"dp{layout.dp}-pp{layout.pp}")
@pytest.mark.parametrize("zero", [0, 1])
def test_a_scale_that_is_too_large_is_halved_until_steps_count(zero: int, layout: ParallelLayout) -> None:
    start = {"initial_loss_scale": 2.0**30, "hysteresis": 1, "zero": zero}
    one, other = run(layout, 30, None, start)
    assert [seen.step.skipped for seen in one] == [seen.step.skipped for seen in other]
    assert one[0].step.skipped
    assert not any(seen.step.skipped for seen in one[-5:])
    for metrics, next_scale, changed in [*one, *other]:
        assert changed != metrics.skipped
        assert next_scale * (2 if metrics.skipped else 1) == metrics.loss_scale


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"dp{layout.dp}-pp{layout.pp}")
def test_figures_are_those_of_fp32(layout: ParallelLayout) -> None:
    """The scale is in neither the loss nor the norm."""
    scaled = run(layout, 4, None, {"initial_loss_scale": 2.0**12})[0]
    plain = run(layout, 4, None, {}, dtype=torch.float32)[0]
    assert not any(seen.step.skipped for seen in scaled)
    for (one, *_), (other, *_) in zip(scaled, plain, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=2e-3)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=2e-2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"dp{layout.dp}-pp{layout.pp}")
@pytest.mark.parametrize("zero", [0, 1])
def test_what_overflows_on_one_rank_is_skipped_on_all(zero: int, layout: ParallelLayout) -> None:
    start = {"initial_loss_scale": 2.0**12, "hysteresis": 2, "zero": zero, "overlap": False}
    for seen in run(layout, 4, 1, start):
        assert [each.step.skipped for each in seen] == [False, True, False, False]
        assert [each.changed for each in seen] == [True, False, True, True]
        assert {each.step.loss_scale for each in seen} == {2.0**12}, "one chance is used up, the scale stays"

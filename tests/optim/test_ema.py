"""The average of the weights is its definition, logical tensor by logical tensor; a skipped step leaves it alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.data.batch import whole_batch
from megalite.launch.context import ParallelContext
from megalite.optim.buffers import TrainingBuffers
from megalite.train.build import Training, build_training, fill_with_start_values
from megalite.train.saving import owned_pieces
from megalite.train.step import TrainStep
from tests.layouts.training import assembled
from tests.optim.small_model import small_config

STEPS, SKIPPED = 7, (0, 3)
Named = dict[str, Tensor]


def logical(training: Training, slices: list[Tensor]) -> Named:
    """Copies in fp64, by parameter."""
    found = assembled([*owned_pieces("", training.buffers.owned, slices)])
    return {name: value.double() for name, value in found.items()}


def averages(half_life: float, dtype: torch.dtype, optimizer: str) -> tuple[Named, Named, float, list[bool]]:
    """After STEPS steps the averages, what a plain loop over logical masters says, and the largest difference of a
    master from its average; and whether each step of SKIPPED has kept every bit."""
    settings = {"name": optimizer, "lr": 0.05, "ema_half_life_steps": half_life, "qk_clip": 1e-3}  # clips all heads
    config, context = small_config(optimizer=settings), ParallelContext(dtype=dtype)
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    step, weight = TrainStep(training, config.optimizer, context), 1 - 2 ** (-1 / half_life)
    expected, largest, kept = logical(training, training.buffers.masters), 0.0, []
    for number in range(STEPS):
        tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(number))
        batch = whole_batch(tokens, tokens.roll(1, 1), tokens >= 0, torch.arange(8).expand_as(tokens), None, 0)
        before = [average.clone() for average in training.buffers.averages]
        step([batch], 16, 0.05, refused=number in SKIPPED)
        if number in SKIPPED:
            pairs = zip(before, training.buffers.averages, strict=True)
            kept.append(all(torch.equal(one, other) for one, other in pairs))
            continue
        for name, master in logical(training, training.buffers.masters).items():
            largest = max(largest, float((master - expected[name]).abs().max()))
            expected[name] = expected[name] + weight * (master - expected[name])
    assert 0.01 < largest < 1.0, "the weights move, and by less than what they are"
    return logical(training, training.buffers.averages), expected, largest, kept


def assert_right(half_life: float, dtype: torch.dtype, optimizer: str) -> None:
    """A step rounds the difference, its product with the rounded weight, and the sum, or as many numbers where the
    weight is above one half: at most four roundings of numbers that are at most `size`."""
    found, expected, largest, kept = averages(half_life, dtype, optimizer)
    spacing = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    for name, value in expected.items():
        size = float(value.abs().max()) + largest
        assert float((found[name] - value).abs().max()) <= 4 * STEPS * spacing * size, name
    assert kept == [True, True]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half_life", [0.5, 3.0, 1000.0])
def test_the_average_is_a_plain_loop_s(half_life: float, dtype: torch.dtype, optimizer: str) -> None:
    assert_right(half_life, dtype, optimizer)


def changes_when_skipped(patch: pytest.MonkeyPatch) -> None:
    average = TrainingBuffers.average
    patch.setattr(TrainingBuffers, "average", lambda self, weight: average(self, torch.full_like(weight, 0.2)))


def starts_at_zero(patch: pytest.MonkeyPatch) -> None:
    init = TrainingBuffers.__init__

    def and_hide(self: TrainingBuffers, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.kept = {"master": self.masters}

    patch.setattr(TrainingBuffers, "__init__", and_hide)


def follows_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """It is moved before the masters are."""
    call = TrainStep.__call__

    def early(self: TrainStep, *args: Any, **options: Any) -> Any:
        masters, kept = self._training.buffers.masters, [master.clone() for master in self._training.buffers.masters]
        average = TrainingBuffers.average

        def of_kept(buffers: TrainingBuffers, weight: Tensor) -> None:
            buffers.masters = kept
            average(buffers, weight)
            buffers.masters = masters

        patch.setattr(TrainingBuffers, "average", of_kept)
        pending = call(self, *args, **options)
        patch.setattr(TrainingBuffers, "average", average)
        return pending

    patch.setattr(TrainStep, "__call__", early)


@pytest.mark.parametrize("mutant", [changes_when_skipped, starts_at_zero, follows_the_step_before])
def test_a_wrong_average_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        assert_right(3.0, torch.float64, "adamw")

"""Data parallelism computes what one process computes, in fp64, and a broken one is caught."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.train.step import TrainStep
from tests.layouts.reference import reference
from tests.layouts.training import Trace, assert_same_training, train
from tests.ranks import run_ranks

RAGGED = {"data": {"mask_end_of_document": True, "cross_document_attention": False}}
ROWS: list[tuple[int, str, dict[str, dict[str, Any]]]] = [
    (2, "gpt2", {}),
    (2, "llama", RAGGED),
    (2, "qwen3", {"train": {"recompute": "full"}}),
    (4, "llama", {"train": {"micro_batch_size": 3}}),  # one microbatch a rank: no accumulation
    (4, "gpt2", RAGGED),
    (3, "qwen3", {"train": {"micro_batch_size": 2}}),
    (2, "gpt2", {"model": {"attention_dropout": 0.3}, "train": {"micro_batch_size": 2}}),
]
LONG_ROWS = [
    (size, family, {**masks, "train": {"recompute": recompute, "micro_batch_size": micro}})
    for size in (2, 3, 4)
    for family in ("gpt2", "llama", "qwen3")
    for masks in ({}, RAGGED)
    for recompute in ("none", "full")
    for micro in (1, 12 // size)
]


def check_row(workplace: tuple[Path, Path], size: int, family: str, overrides: dict[str, Any]) -> None:
    config, expected = reference(workplace, family, overrides)
    assert min(expected.grad_norms) > 10 * config.optimizer.clip_grad, "clipping is part of what is compared"
    assert (len(set(expected.tokens)) > 1) == ("data" in overrides), "a ragged mask changes the number of tokens"
    assert_same_training(run_ranks(train, size, config, dtype=torch.float64), expected)


@pytest.mark.parametrize(("size", "family", "overrides"), ROWS)
def test_ranks_train_like_one_process(
    workplace: tuple[Path, Path], size: int, family: str, overrides: dict[str, Any]
) -> None:
    check_row(workplace, size, family, overrides)


@pytest.mark.long
@pytest.mark.parametrize(("size", "family", "overrides"), LONG_ROWS)
def test_ranks_train_like_one_process_everywhere(
    workplace: tuple[Path, Path], size: int, family: str, overrides: dict[str, Any]
) -> None:
    check_row(workplace, size, family, overrides)


def _without_gradient_sum(context: ParallelContext, config: Config) -> Trace:
    summed = TrainStep._all_reduce
    TrainStep._all_reduce = (  # type: ignore[method-assign]
        lambda self, tensor, group: tensor if tensor.ndim else summed(self, tensor, group)
    )
    return train(context, config)


def _averaging_local_means(context: ParallelContext, config: Config) -> Trace:
    """The classic mistake: each rank divides by its own tokens, then gradients are averaged."""
    summed = TrainStep._all_reduce

    def broken(self: TrainStep, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        if tensor.dtype == torch.int64 or group is None:
            return tensor
        return summed(self, tensor, group).div_(context.size("dp"))

    TrainStep._all_reduce = broken  # type: ignore[method-assign]
    return train(context, config)


@pytest.mark.parametrize("mutant", [_without_gradient_sum, _averaging_local_means])
def test_a_broken_gradient_sum_is_caught(workplace: tuple[Path, Path], mutant: Any) -> None:
    config, expected = reference(workplace, "llama", RAGGED)
    broken = run_ranks(mutant, 2, config, dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_same_training(broken, expected)

"""Ranks that hold other parameters are found and named."""

import pytest
import torch
from torch import Tensor

from megalite.parallel.context import ParallelContext
from megalite.train.replicas import ReplicaMismatchError, check_replicas, content_hash
from tests.ranks import run_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_flipped_bit_and_any_swap_changes_the_hash(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = int(content_hash(values))
    raw = values.view(torch.uint8)
    for bit in range(0, raw.numel() * 8, 97):
        raw[bit // 8] ^= 1 << (bit % 8)
        assert int(content_hash(values)) != before
        raw[bit // 8] ^= 1 << (bit % 8)
    swapped = values.clone()
    swapped[[3, 700]] = swapped[[700, 3]]
    assert int(content_hash(swapped)) != before
    assert int(content_hash(values)) == before


def _check(context: ParallelContext, broken_rank: int | None) -> str | None:
    masters = torch.arange(10.0)
    if context.rank == broken_rank:
        masters.view(torch.int32)[4] ^= 1
    try:
        check_replicas([torch.ones(3), masters], context.group("dp"), 7)
    except ReplicaMismatchError as error:
        return str(error)
    return None


def test_equal_replicas_pass_and_one_flipped_bit_is_named_on_every_rank() -> None:
    assert run_ranks(_check, 3, None) == [None] * 3
    for message in run_ranks(_check, 3, 1):
        assert message is not None
        assert "ranks [1]" in message
        assert "step 7" in message


def test_a_single_replica_needs_no_check() -> None:
    lonely: Tensor = torch.ones(3)
    check_replicas([lonely], None, 1)

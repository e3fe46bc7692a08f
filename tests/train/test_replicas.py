"""Ranks that hold other parameters are found and named."""

from dataclasses import dataclass, replace

import pytest
import torch

from megalite.config.derive import derive
from megalite.config.schema import Config
from megalite.model.parameters import gpt_parameters
from megalite.optim.buffers import buffer_layout
from megalite.parallel.context import ParallelContext
from megalite.parallel.groups import GroupNeeds
from megalite.parallel.layout import ParallelLayout
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


@dataclass(frozen=True)
class Flip:
    """One bit of the first element of some of a rank's state."""

    rank: int
    buffer: int  # of masters, first and second moments
    part: str  # own: what the rank has of a split parameter; shared: with its tp group; key-value: heads


KV_HEADS = 1


def _message(context: ParallelContext, flip: Flip | None) -> str | None:
    """What the check says where only `flip` is wrong."""
    config = Config()
    config.model = replace(config.model, num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=11)
    config.model.num_key_value_heads = KV_HEADS
    size, index = context.size("tp"), context.index("tp")
    layout = buffer_layout(gpt_parameters(derive(config).model), size=size, index=index)
    own, shared = (torch.Generator().manual_seed(seed) for seed in (index, 99))
    state = [torch.randn(layout.size, generator=own) for _ in range(3)]
    for flat in state:
        for part in layout.replicated(flat) + layout.shared_tails(flat):
            part.copy_(torch.randn(part.shape, generator=shared))
    if flip is not None and context.rank == flip.rank:
        flat = state[flip.buffer]
        parts = {"own": [flat], "shared": layout.replicated(flat), "key-value": layout.shared_tails(flat)}[flip.part]
        parts[-1].view(torch.int32)[(0,) * parts[-1].ndim] ^= 1
    try:
        check_replicas(state, layout, context, 7)
    except ReplicaMismatchError as error:
        return str(error)
    return None


def messages(flip: Flip | None, *, tp: int, dp: int) -> list[str | None]:
    return run_ranks(_message, tp * dp, flip, layout=ParallelLayout(tp=tp, dp=dp), needs=GroupNeeds(kv_heads=KV_HEADS))


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 3), (2, 2), (4, 1)])
def test_equal_replicas_pass(tp: int, dp: int) -> None:
    assert messages(None, tp=tp, dp=dp) == [None] * (tp * dp)


@pytest.mark.parametrize(
    ("flip", "tp", "dp", "named"),
    [
        (Flip(1, 0, "own"), 1, 3, [1]),
        (Flip(3, 0, "own"), 2, 3, [3]),  # the rest of its group hold the same
        (Flip(3, 0, "own"), 2, 2, [1, 3]),  # either may be wrong; rank 0 compares with neither
        (Flip(3, 1, "shared"), 4, 1, [3]),
        (Flip(1, 0, "key-value"), 2, 1, [0, 1]),
        (Flip(1, 1, "key-value"), 2, 1, [0, 1]),
        (Flip(1, 2, "key-value"), 4, 1, [1]),
    ],
)
def test_one_flipped_bit_is_told_with_its_rank_by_every_rank(flip: Flip, tp: int, dp: int, named: list[int]) -> None:
    said = messages(flip, tp=tp, dp=dp)
    assert len(set(said)) == 1, said
    assert said[0] is not None
    assert f"step 7: parameters or moments of ranks {named} differ" in said[0]

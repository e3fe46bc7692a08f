"""Ranks that hold other parameters are found and named."""

from dataclasses import dataclass, replace

import pytest
import torch

from megalite.checkpoint.manifest import Piece
from megalite.config.derive import derive
from megalite.config.schema import Config, MoEConfig
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import GroupNeeds, ParallelLayout
from megalite.model.gpt import Routers
from megalite.train.build import build_training, fill_with_start_values
from megalite.train.saving import TrainingStoppedError, check_replicas, content_hash, owned_pieces
from tests.checkpoint.samples import index_of
from tests.layouts.training import held_pieces
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
    """One bit of a rank's state."""

    rank: int
    kind: str  # parameters (what the model computes with), masters, exp_avg, exp_avg_sq, routers
    name: str  # of the parameter; its last element there is changed


KV_HEADS = 1
EXPERTS = MoEConfig(num_experts=4, ffn_hidden_size=8)
EXPERT, ROUTER = "blocks.1.moe.experts.down.weight", "blocks.1.moe.router.expert_bias"
SPLIT, WHOLE, KEYS = "blocks.1.mlp.down.weight", "blocks.1.mlp_norm.weight", "blocks.1.attention.qkv.weight"


def _message(context: ParallelContext, flip: Flip | None, zero: int) -> str | None:
    """What the check says where only `flip` is wrong."""
    config = Config()
    config.model = replace(config.model, num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=11)
    config.model.num_key_value_heads = KV_HEADS
    if context.layout.etp is not None:
        config.model.moe, config.parallel.ep, config.parallel.etp = EXPERTS, context.layout.ep, context.layout.etp
    config.optimizer.zero, config.train.compile = zero, False
    config = derive(replace(config, parallel=replace(config.parallel, tp=context.layout.tp, pp=context.layout.pp)))
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    buffers, optimizer = training.buffers, training.optimizer
    kinds = {"masters": buffers.masters, "exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq}
    for kind in ("exp_avg", "exp_avg_sq"):
        for piece in owned_pieces("", buffers.owned, kinds[kind]):
            drawn = torch.randn(piece.logical_shape, generator=torch.Generator().manual_seed(len(piece.name)))
            piece.tensor.copy_(drawn[index_of(piece)])
    if flip is not None and context.rank == flip.rank:
        held = {kind: list(owned_pieces("", buffers.owned, slices)) for kind, slices in kinds.items()}
        held["parameters"] = list(held_pieces(buffers))
        held["routers"] = [Piece(name, (4,), (0,), value) for name, value in Routers(training.chunks).state()]
        last = [piece.tensor for piece in held[flip.kind] if piece.name == flip.name][-1]
        last.view(torch.int32)[(-1,) * last.ndim] ^= 1
    try:
        check_replicas(training, context, 7)
    except TrainingStoppedError as error:
        return str(error)
    return None


def messages(flip: Flip | None, zero: int, axes: dict[str, int]) -> list[str | None]:
    needs, layout = GroupNeeds(kv_heads=KV_HEADS, tied_embeddings=True), ParallelLayout(**axes)
    return run_ranks(_message, layout.world_size, flip, zero, layout=layout, needs=needs)


DENSE: list[dict[str, int]] = [{}, {"dp": 3}, {"tp": 2, "dp": 2}, {"tp": 4}]
OF_EXPERTS = [{"tp": 2, "dp": 2, "ep": ep, "etp": etp} for ep, etp in ((2, 1), (1, 2), (4, 1), (2, 2))]


@pytest.mark.parametrize("axes", [*DENSE, *OF_EXPERTS], ids=str)
def test_equal_replicas_and_ranks_with_other_experts_pass(axes: dict[str, int]) -> None:
    for zero in (0, 1):
        assert {*messages(None, zero, axes)} == {None}


@pytest.mark.parametrize(
    ("flip", "zero", "axes", "named"),
    [
        (Flip(1, "masters", SPLIT), 0, {"dp": 3}, [1]),
        (Flip(1, "parameters", SPLIT), 1, {"dp": 3}, [1]),  # masters are sharded
        (Flip(3, "exp_avg", SPLIT), 0, {"tp": 2, "dp": 3}, [3]),  # the rest of its group hold the same
        (Flip(3, "masters", SPLIT), 0, {"tp": 2, "dp": 2}, [1, 3]),  # either may be wrong; rank 0 compares with neither
        (Flip(3, "exp_avg", WHOLE), 1, {"tp": 4}, [3]),
        (Flip(1, "masters", KEYS), 1, {"tp": 2}, [0, 1]),
        (Flip(1, "exp_avg_sq", KEYS), 1, {"tp": 4}, [1]),
        (Flip(3, "parameters", EXPERT), 1, OF_EXPERTS[0], [1, 3]),  # ep 2 x edp 2
        (Flip(0, "masters", EXPERT), 0, OF_EXPERTS[0], [0, 2]),
        (Flip(2, "routers", ROUTER), 1, OF_EXPERTS[0], [0, 2, 3]),  # rank 0 over dp, rank 3 over tp
        (Flip(0, "exp_avg", "embedding.word.weight"), 1, {"dp": 2, "pp": 2}, [0, 2]),  # both ends of a pipeline
        (Flip(3, "exp_avg", "embedding.word.weight"), 1, {"dp": 2, "pp": 2}, [1, 3]),
    ],
)
def test_one_flipped_bit_is_told_with_its_rank_by_every_rank(
    flip: Flip, zero: int, axes: dict[str, int], named: list[int]
) -> None:
    said = messages(flip, zero, axes)
    assert len(set(said)) == 1, said
    assert f"step 7: parameters or moments of ranks {named} differ" in str(said[0])

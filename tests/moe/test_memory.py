"""What experts take of memory, counted, is what the formulas of docs/moe.md say, within 5 percent: their parameters and
optimizer state, what a layer keeps of a microbatch for backward, and the most that it needs while it computes."""

import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalite.config.activations import ACTIVATIONS
from megalite.config.derive import derive
from megalite.config.schema import Config, MoEConfig
from megalite.kernels import attention
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.moe.dispatch import ExpertRanks
from megalite.moe.experts import Experts
from megalite.moe.layer import MoELayer
from megalite.moe.router import Router
from megalite.tensor_parallel.layers import TpContext
from megalite.train.build import build_training, derive_device
from tests.model.small import random_batch, training_config, zero_main_grads
from tests.moe.loop import masks_of
from tests.optim.allocations import allocations_of
from tests.pipeline.stages import started
from tests.ranks import run_ranks
from tests.tensor_parallel.live_bytes import LiveBytes
from tests.tensor_parallel.operations import fake_rank

S, B, H, F = 64, 16, 128, 96
BF16, FP32, INT64 = 2, 4, 8  # bytes
TURNS = 8
NORMS = {"recompute": "selective", "recompute_modules": ["norm"]}
EXPERTS = {"recompute": "selective", "recompute_modules": ["moe"]}


def config_of(layers: int, moe: dict[str, Any], train: dict[str, Any]) -> Config:
    experts = MoEConfig(ffn_hidden_size=F, **moe)
    sizes = {"num_layers": layers, "hidden_size": H, "num_attention_heads": 4, "vocab_size": 64, "moe": experts}
    return training_config(sizes, S, precision="bf16", **train)


# --- parameters and optimizer state ----------------------------------------------------------------------------------


LAYOUTS = {
    "ep 2, edp 2": ParallelLayout(dp=4, ep=2, etp=1),
    "ep 2, etp 2, edp 2": ParallelLayout(tp=2, dp=4, ep=2, etp=2),
    "ep 4 over tp and dp": ParallelLayout(tp=2, dp=2, ep=4, etp=1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_rank_keeps_the_state_of_its_experts(layout: ParallelLayout) -> None:
    """What eight more experts add: their own, and a router's rows, which are fp32 and shared out over dp."""
    layers, more, axes = 2, 8, {"tp": layout.tp, "ep": layout.ep, "etp": layout.etp}
    kept = []
    for number in (more, 2 * more):
        config = config_of(layers, {"num_experts": number}, {})
        config.parallel, config.tokenizer = replace(config.parallel, **axes), "byte"
        with fake_rank(layout, layout.world_size - 1) as context:
            ready = derive_device(derive(config, layout.world_size), context)
            training, allocations = allocations_of(lambda: build_training(ready, context))  # noqa: B023
            kept.append(allocations.left)
            del training
    held = layers * more // layout.ep * 3 * H * F // (layout.etp or 1)
    formula = held * (6 + 12 / layout.sizes["edp"]) + layers * more * H * (8 + 8 / layout.dp)
    assert formula == pytest.approx(kept[1] - kept[0], rel=0.05)


# --- what a layer keeps for backward ---------------------------------------------------------------------------------


def kept_by_a_layer(context: ParallelContext, moe: dict[str, Any], train: dict[str, Any]) -> int:
    """Bytes that a second layer adds."""
    kept = []
    for layers in (1, 2):
        config = config_of(layers, moe, train)
        training = started(context, config)
        batch = random_batch(config.model, b=B, s=S, seed=context.index("dp"))
        live = LiveBytes(training.chunks[0].parameters())
        with live, patch.object(attention, "MAX_ROWS", 0):  # torch's kernel of attention, which keeps no scores
            _hidden = training.chunks[0](batch, None, torch.ones(()))
        kept.append(settled(live))
    return kept[1] - kept[0]


def settled(live: LiveBytes) -> int:
    """gloo's threads let go of what they have sent some time after it is there."""
    sizes = [live.now()]
    for _ in range(20):
        time.sleep(0.01)
        sizes.append(live.now())
    return min(sizes)


def formula(moe: dict[str, Any], train: dict[str, Any], ranks: int = 1, etp: int = 1) -> float:
    """Bytes of a layer, on all ranks together."""
    again = train.get("recompute_modules", [])
    experts, k, shared = moe["num_experts"], moe["top_k"], moe.get("num_shared_experts", 0)
    attention = (5 if "norm" in again else 6) * H  # input and output of its norm, queries, keys, values, output
    norm = (1 if "norm" in again else 2) * H  # input and output
    rows = k * etp * (H + (0 if "moe" in again else 2 * F // etp))
    beside = shared * 4 * F
    router = 2 * FP32 * experts + (2 * FP32 + 5 * INT64) * k * etp + INT64
    return ranks * S * B * (BF16 * (attention + norm + rows + beside) + router)


@pytest.mark.parametrize(
    ("moe", "train"),
    [
        ({"num_experts": 8, "top_k": 2}, {}),
        ({"num_experts": 8, "top_k": 2}, EXPERTS),
        ({"num_experts": 8, "top_k": 2}, NORMS),
        ({"num_experts": 32, "top_k": 6}, EXPERTS),
        ({"num_experts": 8, "top_k": 2, "num_shared_experts": 1}, {}),
    ],
    ids=["8, top 2", "recompute moe", "recompute norm", "32, top 6, recompute moe", "shared"],
)
def test_a_layer_keeps_what_the_formula_says(moe: dict[str, Any], train: dict[str, Any]) -> None:
    counted = kept_by_a_layer(ParallelContext(dtype=torch.bfloat16), moe, train)
    assert formula(moe, train) == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2)])
def test_ranks_keep_the_rows_that_they_receive(ep: int, etp: int, dispatcher: str) -> None:
    """All together as many as tokens chose, for each of the etp ranks of an expert; nothing of what was sent."""
    moe = {"num_experts": 8, "top_k": 2, "dispatcher": dispatcher}
    layout = ParallelLayout(dp=2, ep=ep, etp=etp)
    counted = sum(run_ranks(kept_by_a_layer, 2, moe, {}, layout=layout, dtype=torch.bfloat16))
    assert formula(moe, {}, 2, etp) == pytest.approx(counted, rel=0.05)


# --- what a layer needs while it computes ----------------------------------------------------------------------------


def peaks_of_a_layer(context: ParallelContext, dispatcher: str, width: int) -> tuple[int, int, int]:
    """Bytes that experts and router keep for backward, and the most that there were in forward and in backward: the
    least of several turns, as gloo's threads let go of what they have sent sooner or later."""
    moe = MoEConfig(num_experts=8, top_k=4, ffn_hidden_size=width, dispatcher=dispatcher, aux_loss_coeff=0.0)
    ranks, cpu = ExpertRanks.of(context), torch.device("cpu")
    inner = "gate_up", (2, width)
    experts = Experts(moe, H, inner, ACTIVATIONS["swiglu"], ranks, TpContext(context.dtype, cpu))
    layer = MoELayer(Router(moe, H, torch.float32, cpu), experts, ranks)
    weights = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(generator=weights)
    main_grads = zero_main_grads(experts, torch.float32).values()
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(context.rank)).to(context.dtype).requires_grad_()
    masks, y_grad = masks_of(torch.ones(B, S, dtype=torch.bool), torch.ones(())), torch.ones_like(x)
    turns = []
    for _ in range(TURNS):
        x.grad, live = None, LiveBytes([*layer.parameters(), *main_grads, x, y_grad])
        with live:
            y, _ = layer(x, masks)
            forward, kept, live.peak = live.peak, settled(live), 0
            y.backward(y_grad)
        turns.append((kept - y.nbytes, forward, live.peak - y.nbytes))
        del y
    kept, forward, backward = zip(*turns, strict=True)
    return min(kept), min(forward), min(backward)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("width", [32, 256])
@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2)])
def test_ranks_need_for_a_moment_what_the_formula_says(ep: int, etp: int, width: int, dispatcher: str) -> None:
    """Rows on their way, and what experts compute; with `allgather` no more, as tokens are fewer than rows."""
    layout = ParallelLayout(dp=2, ep=ep, etp=etp)
    found = run_ranks(peaks_of_a_layer, 2, dispatcher, width, layout=layout, dtype=torch.bfloat16)
    kept, forward, backward = map(sum, zip(*found, strict=True))
    m, w = 2 * S * B * 4 * etp, width // etp
    in_forward, in_backward = 4 * m * max(H, w), 2 * m * max(H + 6 * w, 2 * H + 4 * w)
    if dispatcher == "alltoall":
        assert kept + in_forward == pytest.approx(forward, rel=0.05)
    assert forward <= 1.05 * (kept + in_forward)
    assert kept + in_backward == pytest.approx(backward, rel=0.05)

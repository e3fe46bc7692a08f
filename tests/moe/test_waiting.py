"""A rank with all experts does not wait for the device: the host asks nothing of it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from megalite.config.activations import ACTIVATIONS
from megalite.config.schema import MoEConfig
from megalite.kernels import grouped
from megalite.moe.dispatch import ExpertRanks
from megalite.moe.experts import Experts
from megalite.moe.layer import MoELayer
from megalite.moe.router import Router
from megalite.tensor_parallel.layers import TpContext
from tests.kernels import plain_expert_rows
from tests.model.small import zero_main_grads
from tests.moe.loop import masks_of

HIDDEN, WIDTH, SEQUENCE, BATCH = 16, 24, 8, 3
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "capacity": {"capacity_factor": 0.5},
    "groups": {"score": "sigmoid", "num_groups": 4, "top_k_groups": 2, "top_k": 4, "expert_bias_rate": 0.1},
    "sequence": {"aux_loss": "sequence", "z_loss_coeff": 0.1},
}


def step_of(settings: dict[str, Any], dtype: torch.dtype, device: torch.device, recompute: bool) -> Callable[[], None]:
    """Forward and backward of a layer; a sequence is padding."""
    moe = MoEConfig(num_experts=8, ffn_hidden_size=WIDTH, **settings)
    swiglu, inner = ACTIVATIONS["swiglu"], ("gate_up", (2, WIDTH))
    experts = Experts(moe, HIDDEN, inner, swiglu, ExpertRanks(), TpContext(dtype, device), recompute=recompute)
    layer = MoELayer(Router(moe, HIDDEN, torch.float32, device), experts, ExpertRanks())
    generator = torch.Generator(device).manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(generator=generator)
    zero_main_grads(experts, torch.float32)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=dtype, device=device, requires_grad=True, generator=generator)
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.bool, device=device)
    mask.select(0, 1).fill_(False)
    shared = partial(torch.mul, 2.0)

    def step() -> None:
        y, _ = layer(x, masks_of(mask, torch.ones((), device=device)), shared)
        y.sum().backward()

    return step


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_layer_asks_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch, name: str, recompute: bool) -> None:
    """Of tensors without values nothing can be asked. With the kernel for all groups, as on the GPUs that have it."""
    monkeypatch.setattr(grouped, "_has_kernel", lambda device: True)
    plain_expert_rows.stand_in(monkeypatch)
    with FakeTensorMode():
        step_of(SETTINGS[name], torch.bfloat16, torch.device("cpu"), recompute)()
        with pytest.raises(DataDependentOutputException):
            step_of(SETTINGS[name], torch.float32, torch.device("cpu"), recompute)()


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_layer_does_not_wait_for_the_device(name: str, recompute: bool) -> None:
    device = torch.device("cuda", 0)
    if not grouped._has_kernel(device):
        pytest.skip("this GPU multiplies experts one by one")
    step = step_of(SETTINGS[name], torch.bfloat16, device, recompute)
    step()  # libraries wait when they are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")

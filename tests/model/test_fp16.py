"""A GPT in fp16: with the loss scale its gradients are those of fp32 to fp16's accuracy, without it they fade away."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.schema import ModelConfig
from megalite.data.batch import Batch
from megalite.model.init import fill, start_values
from megalite.model.parameters import gpt_parameters
from tests.model.small import ALL_DROPOUTS, FAMILIES, gpt, random_batch, small, zero_main_grads

SCALE = 65536.0  # optimizer.initial_loss_scale
GLOBAL_TOKENS = 2**20  # of a step, most of them on other ranks and in other microbatches
ACCURACY = 1e-2  # fp16 rounds by 5e-4; a gradient has gone through some dozens of roundings

Gradients = Mapping[str, Tensor]


def config_of(family: str, **changes: Any) -> ModelConfig:
    return small(**{**FAMILIES[family], "init_std": 0.1, **changes})


def gradients_of(
    config: ModelConfig, dtype: torch.dtype, batch: Batch, loss_scale: float, **settings: Any
) -> tuple[Tensor, Gradients]:
    """Loss and gradients of a microbatch at the start values, divided by the loss scale, in fp64."""
    model = gpt(config, dtype=dtype, **settings)
    fill(model, start_values(gpt_parameters(config), seed=7))
    found = zero_main_grads(model, torch.float32)
    loss = model.loss(batch, torch.tensor(loss_scale / GLOBAL_TOKENS))
    loss.backward()
    found |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == dict(model.named_parameters()).keys()
    return loss.detach() / loss_scale, {name: gradient.double() / loss_scale for name, gradient in found.items()}


def compared(config: ModelConfig, loss_scale: float, batch: Batch | None = None, **settings: Any) -> dict[str, float]:
    """|fp16 with a loss scale - fp32 without| / |fp32| of each gradient; 1 says that nothing is left of it."""
    batch = batch or random_batch(config)
    loss, expected = gradients_of(config, torch.float32, batch, 1.0, **settings)
    scaled_loss, found = gradients_of(config, torch.float16, batch, loss_scale, **settings)
    assert scaled_loss.dtype == torch.float32
    torch.testing.assert_close(scaled_loss, loss, rtol=1e-4, atol=0)
    return {name: float((found[name] - value).norm() / value.norm()) for name, value in expected.items()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropouts", [{}, ALL_DROPOUTS], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_the_loss_scale_gradients_are_those_of_fp32(family: str, dropouts: dict[str, float], packed: bool) -> None:
    config = config_of(family, **dropouts)
    batch = random_batch(config)
    if packed:
        batch = replace(batch, documents=(torch.arange(20) // 7).to(torch.int32).expand(3, 20))
    found = compared(config, SCALE, batch)
    assert max(found.values()) < ACCURACY, found


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_loss_scale_gradients_underflow(family: str) -> None:
    found = compared(config_of(family), 1.0)
    assert min(found.values()) > 0.1, found


def test_label_smoothing_and_z_loss_are_scaled_too() -> None:
    found = compared(config_of("llama"), SCALE, label_smoothing=0.1, z_loss=1e-2)
    assert max(found.values()) < ACCURACY, found


def test_a_loss_scale_that_is_too_large_shows_in_the_gradients_and_not_in_the_loss() -> None:
    config = config_of("llama")
    loss, gradients = gradients_of(config, torch.float16, random_batch(config), 2.0**40)
    assert loss.isfinite()
    broken = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    assert "blocks.0.attention.qkv.weight" in broken, "an infinity on the way back is never lost"


@pytest.mark.long
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks_compute_the_same() -> None:
    config = config_of("llama")
    found = compared(config, SCALE, compile=True)
    assert max(found.values()) < ACCURACY, found

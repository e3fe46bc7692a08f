"""A GPT in fp16: with the loss scale its gradients are those of fp32 to fp16's accuracy, without it they fade away."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.schema import ModelConfig
from megalite.data.batch import Batch
from megalite.launch.context import ParallelContext
from megalite.layout.parameters import shard
from megalite.layout.ranks import ParallelLayout
from megalite.model.gpt import GPT
from megalite.model.init import fill, start_values
from megalite.model.parameters import gpt_parameters
from megalite.tensor_parallel.collectives import TensorGroup
from tests.layout.shards import cut
from tests.model.small import ALL_DROPOUTS, FAMILIES, gpt, random_batch, rank_of, small
from tests.ranks import run_ranks

SCALE = 65536.0  # optimizer.initial_loss_scale
GLOBAL_TOKENS = 2**20  # of a step, most of them on other ranks and in other microbatches
ACCURACY = 1e-2  # fp16 rounds by 5e-4; a gradient has gone through some dozens of roundings

Gradients = Mapping[str, Tensor]


def config_of(family: str, **changes: Any) -> ModelConfig:
    return small(**{**FAMILIES[family], "init_std": 0.1, **changes})


def main_grads_of(model: GPT) -> dict[str, Tensor]:
    """fp32 main gradients of zeros, from now on those of the model."""
    names = model.main_grad_parameters
    main_grads = {name: torch.zeros_like(model.get_parameter(name), dtype=torch.float32) for name in names}
    model.set_main_grads(main_grads)
    return main_grads


def model_of(config: ModelConfig, dtype: torch.dtype, **settings: Any) -> tuple[GPT, dict[str, Tensor]]:
    """A model at its start values, with its main gradients."""
    model = gpt(config, dtype=dtype, **settings)
    fill(model, start_values(gpt_parameters(config), seed=7))
    return model, main_grads_of(model)


def gradients_of(model: GPT, main_grads: Gradients, batch: Batch, loss_scale: float) -> tuple[Tensor, Gradients]:
    """Loss and gradients of a microbatch, divided by the loss scale, in fp64."""
    loss = model.loss(batch, torch.tensor(loss_scale / GLOBAL_TOKENS))
    loss.backward()
    found: dict[str, Tensor] = dict(main_grads)
    found |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == dict(model.named_parameters()).keys()
    return loss.detach() / loss_scale, {name: gradient.double() / loss_scale for name, gradient in found.items()}


def errors(found: Gradients, expected: Gradients) -> dict[str, float]:
    """|found - expected| / |expected| of each gradient; 1 says that nothing is left of it."""
    return {name: float((found[name] - value).norm() / value.norm()) for name, value in expected.items()}


def compared(config: ModelConfig, loss_scale: float, batch: Batch | None = None, **settings: Any) -> dict[str, float]:
    """Errors of fp16 with a loss scale against fp32 without."""
    batch = batch or random_batch(config)
    loss, expected = gradients_of(*model_of(config, torch.float32, **settings), batch, 1.0)
    scaled_loss, found = gradients_of(*model_of(config, torch.float16, **settings), batch, loss_scale)
    assert scaled_loss.dtype == torch.float32
    torch.testing.assert_close(scaled_loss, loss, rtol=1e-4, atol=0)
    return errors(found, expected)


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
    loss, gradients = gradients_of(*model_of(config, torch.float16), random_batch(config), 2.0**40)
    assert loss.isfinite()
    broken = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    assert "blocks.0.attention.qkv.weight" in broken, "an infinity on the way back is never lost"


def test_microbatches_are_summed_in_fp32() -> None:
    config = config_of("gpt2")
    model, main_grads = model_of(config, torch.float16)
    batch = random_batch(config)
    model.loss(batch, torch.tensor(SCALE / GLOBAL_TOKENS)).backward()
    once = {name: main_grad.clone() for name, main_grad in main_grads.items()}
    for _ in range(2):
        model.loss(batch, torch.tensor(SCALE / GLOBAL_TOKENS)).backward()
    for name, main_grad in main_grads.items():
        torch.testing.assert_close(main_grad, 3 * once[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_those_of_fp32(family: str) -> None:
    config = config_of(family)
    batch = random_batch(config)
    exact, rounded = (model_of(config, dtype)[0].logits(batch).detach() for dtype in (torch.float32, torch.float16))
    assert rounded.dtype == torch.float16
    assert (rounded.float() - exact).norm() < ACCURACY * exact.norm()


def _gradients_on_a_rank(context: ParallelContext, config: ModelConfig, sequence_parallel: bool) -> Gradients:
    """The gradients of a tensor-parallel rank's shards in fp16, summed over nobody."""
    tp = TensorGroup.of(context.group("tp"))
    assert tp is not None
    model = rank_of(model_of(config, torch.float16)[0], tp, sequence_parallel=sequence_parallel)
    return gradients_of(model, main_grads_of(model), random_batch(config), SCALE)[1]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_have_the_gradients_of_fp32(family: str, sequence_parallel: bool) -> None:
    config = config_of(family)
    _, expected = gradients_of(*model_of(config, torch.float32), random_batch(config), 1.0)
    ranks = run_ranks(_gradients_on_a_rank, 2, config, sequence_parallel, layout=ParallelLayout(tp=2))
    for index, found in enumerate(ranks):
        for record in gpt_parameters(config, sequence_parallel=sequence_parallel):
            wanted = cut(expected[record.name], shard(record, 2, index))
            of_rank = found[record.name]
            if "tp" in record.partial_over:
                of_rank = sum(other[record.name] for other in ranks)
            assert (of_rank - wanted).norm() < ACCURACY * wanted.norm(), (index, record.name)


@pytest.mark.long
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks_compute_the_same() -> None:
    config = config_of("llama")
    found = compared(config, SCALE, compile=True)
    assert max(found.values()) < ACCURACY, found

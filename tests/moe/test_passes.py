"""The element-wise passes of experts, as they are and compiled, beside autograd in fp64."""

import pytest
import torch

from megalite.config.activations import ACTIVATIONS
from megalite.moe.experts import _compiled_passes, _scaled, _scaled_backward


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_passes_equal_autograd_and_give_unused_rows_weights_no_gradient(name: str, compiled: bool, device: str) -> None:
    """Numbers of rows that differ, none among them; rows that are not used hold NaN."""
    activation, width = ACTIVATIONS[name], 24
    forward, backward = _compiled_passes() if compiled else (_scaled, _scaled_backward)
    for rows in (16, 40, 0, 1):
        generator = torch.Generator().manual_seed(rows)
        shapes = (rows, width * (1 + activation.gated)), (rows,), (rows, width)
        before, weights, grad = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
        used = torch.tensor(max(0, rows - 3), device=device)
        exact = [part.double().requires_grad_() for part in (before, weights)]
        scaled = activation(exact[0]) * exact[1].unsqueeze(1)
        grads = torch.autograd.grad(scaled, exact, grad.double())
        before[used:], grad[used:] = torch.nan, torch.nan
        found = forward(activation, before, weights), *backward(activation, before, weights, grad.clone(), used)
        for part, wanted in zip(found, (scaled, *grads, scaled), strict=True):
            torch.testing.assert_close(part[:used].double(), wanted[:used].detach(), rtol=1e-5, atol=1e-5)
        assert not found[2][used:].any(), "of their weights"

"""Kernels of attention in bf16 beside fp64 (in fp64: model/test_attention.py)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels.attention import attention
from megalite.kernels.attention_mask import AttentionMask, block_mask, dense_mask
from megalite.model.attention import attention_backends

S, B, GROUPS, Q, D = 300, 2, 3, 2, 64
DOCUMENTS = torch.arange(S).div(torch.tensor([[70], [131]]), rounding_mode="floor").to(torch.int32)
FORMS = ["dense on a CPU", *(pytest.param(each, marks=pytest.mark.gpu) for each in ("dense", "flex", "cudnn", "flash"))]
ROUNDED = torch.finfo(torch.bfloat16).eps / 2
EPS = torch.finfo(torch.float32).eps


def with_bounds(queries: Tensor, keys: Tensor, values: Tensor, grad: Tensor, hidden: Tensor) -> list[list[Tensor]]:
    """Output and gradients of queries, keys and values [b, groups, q, s, d] in fp64, and how far a kernel may be from
    them that sums in fp32 and rounds to bf16 probabilities, gradients of scores and results.

    `sums`: how far fp32's sums of a score move an exponential, and how far its own sums err. A row's sum of gradient
    times output, which all gradients of scores have, is of the rounded output. Gradients of keys and values are those
    of each query head, rounded, summed and rounded once more.
    """
    scale = D**-0.5
    scores = scale * queries @ keys.mT
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    sums = EPS * (D * scale * float((queries.abs() @ keys.abs().mT).max()) + S + D)
    out = probabilities @ values
    out_bound = (ROUNDED + sums) * probabilities @ values.abs() + ROUNDED * out.abs()
    of_row = (grad * out).sum(-1, keepdim=True)
    of_scores, pull = probabilities * (grad @ values.mT - of_row), grad.abs() @ values.abs().mT
    row_bound = (grad.abs() * (out_bound + (ROUNDED + sums) * out.abs())).sum(-1, keepdim=True)
    scores_bound = probabilities * (row_bound + sums * pull) + (ROUNDED + sums) * of_scores.abs()
    gradients = [
        (scale * of_scores @ keys, scale * scores_bound @ keys.abs()),
        (scale * of_scores.mT @ queries, scale * scores_bound.mT @ queries.abs()),
        (probabilities.mT @ grad, (ROUNDED + sums) * probabilities.mT @ grad.abs()),
    ]
    found = [[out, out_bound]]
    for at, (exact, bound) in enumerate(gradients):
        if at > 0:
            bound = (bound + ROUNDED * exact.abs()).sum(2, keepdim=True)
            exact = exact.sum(2, keepdim=True)
        found.append([exact, 1.02 * (bound + ROUNDED * exact.abs())])
    return found


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("form", FORMS)
def test_kernels_in_bf16_err_by_their_roundings(form: str) -> None:
    """Causal attention, with masks of documents where the kernel takes one, and two query heads for each key head."""
    device, masked = torch.device("cpu" if "CPU" in form else "cuda"), form not in ("cudnn", "flash")
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(S, B, GROUPS, heads, D, generator=generator).bfloat16() for heads in (Q, 1, 1)]
    grad = torch.randn(S, B, GROUPS, Q, D, generator=generator).bfloat16()
    documents = DOCUMENTS if masked else torch.zeros_like(DOCUMENTS)
    hidden = dense_mask(documents, torch.float32).isinf().unsqueeze(2)  # [b, 1, 1, s, s]
    exact = with_bounds(*(part.permute(1, 2, 3, 0, 4).double() for part in (*parts, grad)), hidden)
    there: Any = documents.to(device)
    given = block_mask(there) if form == "flex" else dense_mask(there, torch.bfloat16) if masked else None
    mask = AttentionMask(given, form if form in ("cudnn", "flash", "flex") else "auto")

    def run(*parts: Tensor) -> Tensor:
        with attention_backends(device, mask):
            return attention(*parts, mask)

    leaves = [part.to(device).requires_grad_() for part in parts]
    out = (torch.compile(run, fullgraph=True, dynamic=False) if form == "flex" else run)(*leaves)
    grads = torch.autograd.grad(out, leaves, grad.to(device).flatten(2))
    for found, (wanted, bound) in zip((out.view(S, B, GROUPS, Q, D), *grads), exact, strict=True):
        error = (found.detach().cpu().permute(1, 2, 3, 0, 4).double() - wanted).abs()
        assert bool((error <= bound).all()), float((error / bound).max())

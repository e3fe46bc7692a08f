"""Embedding lookup whose gradient is added to a main gradient, in a fixed order."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def embed(tokens: Tensor, weight: Tensor, main_grad: Tensor | None) -> Tensor:
    """Rows of weight [rows, h]: tokens [...] -> [..., h]. With a `main_grad` [rows, h] autograd sees no gradient."""
    if main_grad is None:
        return F.embedding(tokens, weight)
    return _MainGradEmbedding.apply(tokens, weight, main_grad)  # type: ignore[no-any-return]


class _MainGradEmbedding(torch.autograd.Function):
    """Autograd's own gradient is a dense tensor of the table's size per microbatch, in its dtype. The main gradient
    receives the rows of the batch's tokens in its own dtype; on a CPU nothing else is touched."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.main_grad = main_grad
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (tokens,), main_grad = ctx.saved_tensors, ctx.main_grad
        rows, values = tokens.flatten(), grads[0].flatten(0, -2).to(main_grad.dtype)
        if main_grad.is_cuda:  # index_add_ would add by atomics, in any order; the embedding's own backward sorts
            main_grad += torch.ops.aten.embedding_dense_backward(values, rows, len(main_grad), -1, False)
        else:
            main_grad.index_add_(0, rows, values)
        return None, None, None

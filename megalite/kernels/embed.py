"""Embedding lookup whose gradient is added to a main gradient, in a fixed order."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def embed(tokens: Tensor, weight: Tensor, main_grad: Tensor | None) -> Tensor:
    """Rows of weight [rows, h]: tokens [...] -> [..., h]. With a `main_grad` [rows, h] autograd sees no gradient."""
    embedded: Tensor = (
        F.embedding(tokens, weight) if main_grad is None else _MainGradEmbedding.apply(tokens, weight, main_grad)
    )
    return embedded


class _MainGradEmbedding(torch.autograd.Function):
    """F.embedding whose gradient is added to `main_grad` [rows, h]; autograd sees none.

    Autograd's own is a dense tensor of the table's size per microbatch, in its dtype. The main gradient receives the
    rows of the batch's tokens in its own dtype; on a CPU nothing else is touched.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.main_grad = main_grad
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (tokens,) = ctx.saved_tensors
        add_rows(ctx.main_grad, tokens.flatten(), grads[0].flatten(0, -2).to(ctx.main_grad.dtype))
        return None, None, None


def add_rows(main_grad: Tensor, rows: Tensor, values: Tensor) -> None:
    """main_grad[rows[i]] += values[i], repeated rows added up in a fixed order.

    main_grad [rows, h], rows [n], values [n, h].
    """
    if main_grad.is_cuda:  # index_add_ would add by atomics, in any order; the embedding's own backward sorts
        main_grad += torch.ops.aten.embedding_dense_backward(values, rows, len(main_grad), -1, False)
    else:
        main_grad.index_add_(0, rows, values)

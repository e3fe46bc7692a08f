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
    receives the rows of the batch's tokens in its own dtype; nothing else is touched."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.main_grad = main_grad
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (tokens,), main_grad = ctx.saved_tensors, ctx.main_grad
        rows, values = tokens.flatten(), grads[0].flatten(0, -2).to(main_grad.dtype)
        if main_grad.is_cuda:  # index_add_ alone would add by atomics, in any order
            add_sums_of_equal_rows(main_grad, rows, values)
        else:
            main_grad.index_add_(0, rows, values)
        return None, None, None


def add_sums_of_equal_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """total[rows[i]] += values[i] for all i, in one order: total [V, h], rows [n], values [n, h].

    The embedding's own backward, which sorts, sums the values of equal rows, in a table of V rows or of n, the smaller.
    Of n, the sum stands where its row comes first, and all else is zero: each row of `total` has one number to add, and
    the atomics that do it know no order.
    """
    sum_up = torch.ops.aten.embedding_dense_backward
    if len(total) <= len(rows):
        total += sum_up(values, rows.int(), len(total), -1, False)
        return
    places = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    first = torch.full((len(total),), len(rows), dtype=torch.int32, device=rows.device)
    first.scatter_reduce_(0, rows, places, "amin")  # of each row of the table, its first place among `rows`
    total.index_add_(0, rows, sum_up(values, first[rows], len(rows), -1, False))

"""Copies tokens into rows, one for each expert that computes with them, and sums rows back into tokens.

Either is the other's gradient. Both are reads in the order in which they write, so that no two rows meet in one place
and every sum has one order.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Rows(NamedTuple):
    """Which token each of m rows is a copy of, and where the rows of each of t tokens are."""

    token_of_row: Tensor  # [m], int64
    rows_of_token: Tensor  # [t, n], int64; m stands for none
    complete: bool  # whether no m is among them

    def take(self, x: Tensor) -> Tensor:
        """x [t, h] -> [m, h], the token of each row."""
        return _Take.apply(x, *self)  # type: ignore[no-any-return]

    def sum(self, rows: Tensor) -> Tensor:
        """rows [m, h] -> [t, h], the sum of each token's rows."""
        return _Sum.apply(rows, *self)  # type: ignore[no-any-return]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_row: Tensor, rows_of_token: Tensor, complete: bool) -> Tensor:
        ctx.save_for_backward(token_of_row, rows_of_token)
        ctx.complete = complete
        return x.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Sum.apply(grads[0], *ctx.saved_tensors, ctx.complete), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, rows_of_token: Tensor, complete: bool) -> Tensor:
        ctx.save_for_backward(token_of_row, rows_of_token)
        ctx.complete = complete
        rows = rows if complete else F.pad(rows, (0, 0, 0, 1))
        first, *others = rows_of_token.unbind(1)
        total = rows.index_select(0, first)
        for its in others:
            total += rows.index_select(0, its)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Take.apply(grads[0], *ctx.saved_tensors, ctx.complete), None, None, None

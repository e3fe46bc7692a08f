"""Copies tokens into rows, one for each expert that computes with them, and sums rows back into tokens.

Either is the other's gradient. Both are one kernel and reads in the order in which they write, so that no two rows meet
in one place, and every sum has one order, is made in fp32 (fp64 in fp64) and rounded once. Where the host does not know
how many rows experts compute, sums leave out what is behind them.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Rows(NamedTuple):
    """Which token each of m rows is a copy of, and where the rows of each of t tokens are."""

    token_of_row: Tensor  # [m], int64
    by_token: Tensor  # [m], int64: the rows of the first token, of the second, and so on
    starts: Tensor | None  # [t], int64: where those of each token start in `by_token`; None: each has one
    used: Tensor | None = None  # [1]: so many rows are summed, those behind them are undefined; None: all

    @classmethod
    def of_choices(cls, choices: Tensor, tokens: int, k: int, *, complete: bool, used: Tensor | None = None) -> "Rows":
        """A row for each of `choices` [m], which are numbers of the k choices of each token in a row; `complete`: each
        of them once."""
        token_of_row, device = choices // k, choices.device
        if complete:
            return cls(token_of_row, inverse(choices), torch.arange(0, len(choices), k, device=device), used)
        in_order, by_token = token_of_row.sort(stable=True)
        return cls(token_of_row, by_token, torch.searchsorted(in_order, torch.arange(tokens, device=device)), used)

    def take(self, x: Tensor) -> Tensor:
        """x [t, h] -> [m, h], the token of each row."""
        return _Move.apply(x, False, *self)  # type: ignore[no-any-return]

    def sum(self, rows: Tensor) -> Tensor:
        """rows [m, h] -> [t, h], the sum of each token's rows."""
        return _Move.apply(rows, True, *self)  # type: ignore[no-any-return]


def inverse(order: Tensor) -> Tensor:
    """Where each of 0..m-1 is in `order` [m]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Move(torch.autograd.Function):
    """Takes tokens into rows, or `sums` rows into tokens. Each is the other's adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: bool, *rows: Tensor | None) -> Tensor:
        ctx.sums = sums
        ctx.save_for_backward(*rows)
        token_of_row, by_token, starts, used = rows
        assert token_of_row is not None
        assert by_token is not None
        if not sums or starts is None:
            return x.index_select(0, by_token if sums else token_of_row)
        if used is not None:
            from megalite.kernels.expert_rows import sum_rows  # imports triton

            return sum_rows(x, by_token, starts, used)
        return F.embedding_bag(by_token, x.detach(), starts, mode="sum")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Move.apply(grads[0], not ctx.sums, *ctx.saved_tensors), None, None, None, None, None

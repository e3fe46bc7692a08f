"""Rotary positions applied to queries and keys. The tables are model/rotary.py's."""

from typing import Any

import torch
from torch import Tensor


def rotate(x: Tensor, straight: Tensor, swapped: Tensor) -> Tensor:
    """Rotate queries or keys [s, b, groups, heads, d]."""
    return _Rotate.apply(x, straight, swapped)  # type: ignore[no-any-return]


class _Rotate(torch.autograd.Function):
    """One rotation, not a chain of slices whose gradients each start from a zeroed copy; backward is the turn back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, straight: Tensor, swapped: Tensor) -> Tensor:
        ctx.save_for_backward(straight, swapped)
        return _turn(x, straight, swapped, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        straight, swapped = ctx.saved_tensors
        return _turn(grads[0], straight, swapped, -1), None, None


def _turn(x: Tensor, straight: Tensor, swapped: Tensor, sign: int) -> Tensor:
    """x * straight + sign * (x with its halves swapped) * swapped."""
    factors = [table.transpose(0, 1)[:, :, None, None] for table in (straight, swapped)]  # [s, b, 1, 1, d]
    wide = x.to(straight.dtype)
    turned = torch.addcmul(wide * factors[0], wide.roll(x.shape[-1] // 2, -1), factors[1], value=sign)
    return turned.to(x.dtype).view(x.shape)  # where `to` changes nothing, a view: see dropout.py

"""Rotary positions applied to queries and keys: one pass, in pieces on CPUs. The tables are model/rotary.py's."""

from typing import Any

import torch
from torch import Tensor

from megalite.kernels.pieces import pieces


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
    if torch.compiler.is_compiling():  # without in-place ops, and, where `to` changes nothing, a view: see dropout.py
        wide = x.to(straight.dtype)
        turned = wide * factors[0] + sign * wide.roll(x.shape[-1] // 2, -1) * factors[1]
        return turned.to(x.dtype).view(x.shape)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    whole = (x, out, *factors)
    for part, turned, factor, swapped_factor in pieces(*whole) if x.device.type == "cpu" else [whole]:
        wide = part.to(factor.dtype, memory_format=torch.contiguous_format, copy=True)
        halves_swapped = wide.roll(x.shape[-1] // 2, -1)
        turned.copy_(wide.mul_(factor).addcmul_(halves_swapped, swapped_factor, value=sign))
    return out

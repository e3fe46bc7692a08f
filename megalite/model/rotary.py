"""Rotary positions (Su et al. 2021): pairs of dimensions of queries and keys are turned by position * frequency.

"Rotate half" pairs dimension i with i + d/2, as transformers does. Tables are fp32 (fp64 in fp64), computed once for
the positions of a batch and shared by all layers; what is rotated is rounded to the activations' dtype once.
"""

from math import pi
from typing import Any

import torch
from torch import Tensor

from megalite.config.schema import ModelConfig
from megalite.tensor_parallel.pieces import piece_buffers, pieces


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair of dimensions: [head_size / 2], fp64.

    Llama-3 scaling: frequencies that turn less than `low` times in the original context are divided by the factor,
    those that turn more than `high` times are kept, those between are blended linearly in the number of turns.
    """
    assert config.head_size is not None
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling_factor == 1.0:
        return frequencies
    low, high = config.rope_low_frequency_factor, config.rope_high_frequency_factor
    turns = config.rope_original_positions * frequencies / (2 * pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # share of the unscaled frequency
    return frequencies * (kept + (1.0 - kept) / config.rope_scaling_factor)


def rotary_tables(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of x and of its swapped halves, cosines and signed sines, for positions [b, s]: two [b, s, head_size], or
    [1, s, head_size] of one row of positions that was expanded to b."""
    if positions.stride(0) == 0:
        positions = positions[:1]
    angles = positions[:, :, None] * frequencies  # [b, s, head_size / 2]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(qkv: Tensor, straight: Tensor, swapped: Tensor) -> Tensor:
    """Rotate queries and keys of the fused projection [s, b, groups, q_per_kv + 2, d]; values pass unchanged."""
    return _Rotate.apply(qkv, straight, swapped)  # type: ignore[no-any-return]


def rotate_heads_(x: Tensor, straight: Tensor, swapped: Tensor, sign: int = 1) -> None:
    """Rotate heads [b, heads, s, d] (contiguous) in place on a CPU, or, with the sign -1, turn them back."""
    x = x.view(len(straight), -1, *x.shape[2:])  # one row of tables serves all samples
    half = x.shape[-1] // 2
    buffers = piece_buffers(2, x[0], straight.dtype)
    for heads, factor, swapped_factor in zip(x, straight, swapped, strict=True):
        low, high = swapped_factor.chunk(2, dim=-1)
        for (part,) in pieces(heads):
            wide, turned = buffers[:, : len(part)]
            torch.mul(wide.copy_(part), factor, out=turned)
            turned[..., :half].addcmul_(wide[..., half:], low, value=sign)
            turned[..., half:].addcmul_(wide[..., :half], high, value=sign)
            part.copy_(turned)


class _Rotate(torch.autograd.Function):
    """One rotation, not a chain of slices whose gradients each start from a zeroed copy; backward is the turn back."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, straight: Tensor, swapped: Tensor) -> Tensor:
        ctx.save_for_backward(straight, swapped)
        return _turn(qkv, straight, swapped, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        straight, swapped = ctx.saved_tensors
        return _turn(grads[0], straight, swapped, -1), None, None


def _turn(x: Tensor, straight: Tensor, swapped: Tensor, sign: int) -> Tensor:
    """x * straight + sign * (x with its halves swapped) * swapped for queries and keys; the values are copied."""
    factors = [table.transpose(0, 1)[:, :, None, None] for table in (straight, swapped)]  # [s, b, 1, 1, d]
    if torch.compiler.is_compiling():  # without in-place ops: see _drop in tensor_parallel/dropout.py
        wide = x[..., :-1, :].to(straight.dtype)
        turned = wide * factors[0] + sign * wide.roll(x.shape[-1] // 2, -1) * factors[1]
        return torch.cat((turned.to(x.dtype), x[..., -1:, :]), dim=-2)
    out = torch.empty_like(x)
    whole = (x, out, *factors)
    for part, turned, factor, swapped_factor in pieces(*whole) if x.device.type == "cpu" else [whole]:
        wide = part[..., :-1, :].to(factor.dtype, memory_format=torch.contiguous_format, copy=True)
        halves_swapped = wide.roll(x.shape[-1] // 2, -1)
        turned[..., :-1, :] = wide.mul_(factor).addcmul_(halves_swapped, swapped_factor, value=sign)
        turned[..., -1, :] = part[..., -1, :]
    return out

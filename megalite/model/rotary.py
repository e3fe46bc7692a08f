"""Rotary positions (Su et al. 2021): pairs of dimensions of queries and keys are turned by position * frequency.

"Rotate half" pairs dimension i with i + d/2, as transformers does. Tables are fp32 (fp64 in fp64), computed once for
the positions of a batch and shared by all layers; what is rotated is rounded to the activations' dtype once.
"""

from math import pi
from typing import Any

import torch
from torch import Tensor

from megalite.config.schema import ModelConfig


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


def rotary_tables(frequencies: Tensor, positions: Tensor, q_per_kv: int) -> tuple[Tensor, Tensor]:
    """Factors of x and of its swapped halves, for positions [b, s]: two [s, b, 1, q_per_kv + 1, head_size].

    Cosines and signed sines for the queries and the key, which lie side by side: they are turned in one piece, in long
    contiguous loops. Leaving the value out takes 0.7 of the time of turning it too, by 1 and 0 (bf16, one core).
    """
    angles = positions.t()[:, :, None, None, None] * frequencies  # [s, b, 1, 1, head_size / 2]
    cos, sin = angles.cos(), angles.sin()
    straight = torch.cat((cos, cos), dim=-1).repeat(1, 1, 1, q_per_kv + 1, 1)
    swapped = torch.cat((-sin, sin), dim=-1).repeat(1, 1, 1, q_per_kv + 1, 1)
    return straight, swapped


def rotate(qkv: Tensor, straight: Tensor, swapped: Tensor) -> Tensor:
    """Rotate queries and keys of the fused projection [s, b, groups, q_per_kv + 2, d]; values pass unchanged."""
    return _Rotate.apply(qkv, straight, swapped)  # type: ignore[no-any-return]


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
    turned = x[..., :-1, :].to(straight.dtype, memory_format=torch.contiguous_format, copy=True)
    halves_swapped = turned.roll(x.shape[-1] // 2, -1)
    out = torch.empty_like(x)
    out[..., :-1, :] = turned.mul_(straight).addcmul_(halves_swapped, swapped, value=sign)
    out[..., -1, :] = x[..., -1, :]
    return out

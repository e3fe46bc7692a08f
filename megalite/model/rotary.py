"""Rotary positions (Su et al. 2021): pairs of dimensions of queries and keys are turned by position * frequency.

"Rotate half" pairs dimension i with i + d/2, as transformers does. Tables are fp32 (fp64 in fp64), computed once for
the positions of a batch and shared by all layers; what is rotated is rounded to the activations' dtype once.
"""

from math import ceil, floor, log, pi
from typing import Any

import torch
from torch import Tensor

from megalite.config.schema import ModelConfig


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair of dimensions: [head_size / 2], fp64.

    Scaling divides frequencies by the factor: all of them (linear: Chen et al. 2023, arXiv 2306.15595), or those of
    few turns in the original context, and leaves a share of the others (llama3, yarn).
    """
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling_factor == 1.0:
        return frequencies
    kept = torch.zeros_like(frequencies)  # share of the unscaled frequency
    if config.rope_scaling == "llama3":  # 0 below `low` turns in the original context, 1 above `high`, linear between
        low, high = config.rope_low_frequency_factor, config.rope_high_frequency_factor
        turns = config.rope_original_positions * frequencies / (2 * pi)
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    elif config.rope_scaling == "yarn":
        kept = _kept_by_yarn(config)
    return frequencies * (kept + (1.0 - kept) / config.rope_scaling_factor)


def rotary_magnitude(config: ModelConfig) -> float:
    """What multiplies queries and keys as they are turned: YaRN makes attention sharper where there is more to attend
    to (arXiv 2309.00071, eq. 22). Two scales, as DeepSeek has them, divide each other."""
    if config.rope_scaling != "yarn" or config.rope_scaling_factor == 1.0:
        return 1.0
    if config.rope_attention_factor is not None:
        return config.rope_attention_factor
    over, under = config.rope_mscale, config.rope_mscale_all_dim
    if over is None or under is None:
        over, under = 1.0, 0.0
    step = 0.1 * log(config.rope_scaling_factor)
    return (over * step + 1.0) / (under * step + 1.0)


def _kept_by_yarn(config: ModelConfig) -> Tensor:
    """1 above `fast` turns in the original context, 0 below `slow`, and between them linear in the number of the pair.

    transformers bounds the borders by numbers of dimensions, not pairs, and parts equal ones by 0.001; so it is here.
    """
    pairs = config.head_size // 2
    fast, slow = (  # the pair, a fraction maybe, that turns so many times
        pairs * log(config.rope_original_positions / (2 * pi * turns)) / log(config.rope_theta)
        for turns in (config.rope_beta_fast, config.rope_beta_slow)
    )
    if config.rope_truncate:
        fast, slow = floor(fast), ceil(slow)
    first, last = max(fast, 0), min(slow, config.head_size - 1)
    width = last - first or 0.001
    return 1.0 - ((torch.arange(pairs, dtype=torch.float64) - first) / width).clamp(0.0, 1.0)


def rotary_tables(frequencies: Tensor, positions: Tensor, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Factors of x and of its swapped halves, `magnitude` times cosines and signed sines, for positions [b, s]: two
    [b, s, head_size]. One row of positions for all sequences has b = 1."""
    angles = positions[:, :, None] * frequencies  # [b, s, head_size / 2]
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


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
    wide, half = x.to(straight.dtype), x.shape[-1] // 2
    turned = wide * factors[0]
    if x.is_cuda:  # compiled, one kernel that makes no swapped copy
        turned = torch.addcmul(turned, wide.roll(half, -1), factors[1], value=sign)
    else:
        for at, other in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
            turned[..., at].addcmul_(wide[..., other], factors[1][..., at], value=sign)
    return turned.to(x.dtype).view(x.shape)  # where `to` changes nothing, a view: see dropout.py

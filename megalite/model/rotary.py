"""Rotary positions (Su et al. 2021): pairs of dimensions of queries and keys are turned by position * frequency.

"Rotate half" pairs dimension i with i + d/2, as transformers does. Tables are fp32 (fp64 in fp64), computed once for
the positions of a batch and shared by all layers; what is rotated is rounded to the activations' dtype once.
"""

from math import pi

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


def rotary_tables(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of x and of its swapped halves, cosines and signed sines, for positions [b, s]: two [b, s, head_size], or
    [1, s, head_size] of one row of positions that was expanded to b."""
    if positions.stride(0) == 0:
        positions = positions[:1]
    angles = positions[:, :, None] * frequencies  # [b, s, head_size / 2]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

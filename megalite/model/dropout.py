"""Attention dropout: torch's fused kernels draw its masks from the device's default generator and take no other.

So the generator is seeded anew at the entry of each block, from (seed, first sample of the microbatch, layer, tensor-
parallel rank: ranks hold different heads). No random state is saved or restored, resumed runs draw the same masks, and
so does a recompute in backward. All other dropout is a hash of coordinates (tensor_parallel/dropout.py).
"""

from hashlib import blake2b

import torch


def seed_attention_dropout(seed: int, first_sample: int, layer: int, tp_index: int, device: torch.device) -> None:
    """Seed the device's default generator for one layer's masks of one microbatch."""
    digest = blake2b(repr((seed, "dropout", first_sample, layer, tp_index)).encode(), digest_size=8).digest()
    derived = int.from_bytes(digest, "little") >> 1  # generators take 63 bits
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(derived)
    else:
        torch.default_generator.manual_seed(derived)

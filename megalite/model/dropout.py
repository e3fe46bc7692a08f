"""Dropout masks are derived, not carried: the generator is seeded anew from (seed, microbatch number, layer).

So no random state is saved or restored, resumed runs draw the same masks, and so does a recompute in backward.
"""

from hashlib import blake2b

import torch

EMBEDDING = -1  # in place of a layer's index


def derive_dropout(seed: int, number: int, layer: int, device: torch.device) -> None:
    """Seed the device's default generator for one layer's masks of microbatch `number` of the run."""
    digest = blake2b(repr((seed, "dropout", number, layer)).encode(), digest_size=8).digest()
    derived = int.from_bytes(digest, "little") >> 1  # generators take 63 bits
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(derived)
    else:
        torch.default_generator.manual_seed(derived)

"""Do ranks that should hold the same parameters still do so?

Data-parallel ranks share all of them, tensor-parallel ranks those that are not split. Ranks that drift apart train on
silently with a loss curve that looks normal (bad memory, a collective gone wrong), so their state is compared by hash
now and then.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1 << 22  # elements hashed at a time: bounds the int64 copy
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as a signed 64-bit number: Fibonacci hashing


class ReplicaMismatchError(RuntimeError):
    """Ranks that should hold the same parameters do not."""


def content_hash(tensor: Tensor) -> Tensor:
    """An int64 hash (0-d, on the tensor's device) of the bits of a 1-D tensor; position and value both count."""
    bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        position = torch.arange(start, start + part.numel(), device=tensor.device)
        mixed = (part ^ (position * MULTIPLIER)) * MULTIPLIER
        total += (mixed ^ (mixed >> 29)).sum()  # sums wrap around: exact, and independent of their order
    return total


def check_replicas(state: Sequence[Tensor], group: dist.ProcessGroup | None, step: int) -> None:
    """Raise ReplicaMismatchError, naming the ranks in the minority, unless all of `group` hold equal `state`.

    `state` are flat tensors [size] of parameters and optimizer; `group` is None where there are no replicas.
    """
    if group is None:
        return
    mine = torch.stack([content_hash(tensor) for tensor in state])
    hashes = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(hashes, mine, group=group)
    values = [tuple(value.tolist()) for value in hashes]
    common = max(set(values), key=values.count)
    different = [dist.get_global_rank(group, index) for index, value in enumerate(values) if value != common]
    if different:
        raise ReplicaMismatchError(
            f"step {step}: ranks {different} hold other parameters than the remaining ranks. Something changed them "
            "outside of training (bad memory, a faulty collective). Start again to continue from the newest "
            "checkpoint, without the hosts of these ranks if it happens again."
        )

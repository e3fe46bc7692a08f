"""Checks that ranks which should hold the same parameters still do.

Ranks that drift apart train on silently with a loss curve that looks normal (bad memory, a collective gone wrong), so
the state that they share is compared by hash now and then: see `_replicas` for who shares what.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import Kind, slice_ranges
from megalite.layout.parameters import is_replicated
from megalite.model.routers import Routers
from megalite.optim.buffers import ranges_of
from megalite.optim.optimizer import slices_of
from megalite.train.build import Training
from megalite.train.saving import TrainingStoppedError

CHUNK = 1 << 22  # elements hashed at a time: bounds the int64 copy
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as a signed 64-bit number: Fibonacci hashing


def check_replicas(training: Training, context: ParallelContext, step: int) -> None:
    """TrainingStoppedError, the same on all ranks of the world, unless all replicas hold equal state; collective."""
    found = {rank for parts, group in _replicas(training, context) for rank in different_ranks(parts, group)}
    different = sorted({rank for of_rank in context.gather_json(sorted(found)) for rank in of_rank})
    if different:
        raise TrainingStoppedError(
            f"step {step}: parameters or moments of ranks {different} differ from those of ranks that should hold the "
            "same. Something changed them outside of training (bad memory, a faulty collective). Start again to "
            "continue from the newest checkpoint, without the hosts of these ranks if it happens again."
        )


def _replicas(training: Training, context: ParallelContext) -> Iterator[tuple[list[Tensor], dist.ProcessGroup | None]]:
    """Tensors that all ranks of a group hold alike, by group. Data-parallel ranks share parameters, and those of
    different optimizer replicas also masters and state; tensor-parallel ranks what is not split, and some of them
    key-value heads; the ends of a pipeline a tied embedding; the ranks of a layer what balances its experts."""
    buffers = training.buffers
    training.gather.finish()
    slices = [buffers.masters, *slices_of(training.optimizer.state()).values()]
    axes_of: dict[Kind, str] = {"dense": "dp-cp", "expert": "edp"}
    for kind, axes in axes_of.items():
        numbers = [at for at, bucket in enumerate(buffers.layout.buckets) if bucket.buffer.kind == kind]
        if numbers:
            yield [buffers.parameter_buckets[at] for at in numbers], context.group(axes)
            yield [kept[at] for kept in slices for at in numbers], training.replicas[kind].replicate_group
    shared = {
        "tp": slice_ranges(buffers.owned, lambda record, _: record.split is None),
        "kv-replicas": slice_ranges(buffers.owned, is_replicated),
        "word-embedding": slice_ranges(buffers.owned, lambda record, _: "word-embedding" in record.partial_over),
    }
    for axes, ranges in shared.items():
        yield [part for kept in slices for part in ranges_of(kept, ranges)], context.group(axes)
    for axes in ("dp-cp", "tp"):
        yield [value for _, value in Routers(training.chunks).state()], context.group(axes)


def different_ranks(parts: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[int]:
    """The global ranks of `group` whose `parts` differ from what most of its ranks hold; all, where no such is. None
    where there is no group. The answer is the same on all ranks of the group."""
    if group is None or not parts:
        return []
    mine = torch.stack([content_hash(part.flatten()) for part in parts])
    hashes = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(hashes, mine, group=group)
    values = [tuple(value.tolist()) for value in hashes]
    (common, votes), *others = Counter(values).most_common(2)
    undecided = any(count == votes for _, count in others)  # of two that differ, either may be the wrong one
    return [dist.get_global_rank(group, at) for at, value in enumerate(values) if undecided or value != common]


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

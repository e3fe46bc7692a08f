"""Sums the partial gradients that a rank owns, then counts each element in the norm once.

Several ranks of one model hold some parameters alike, but each computes only a part of their gradient: norms and biases
under sequence parallelism, norms over queries and keys, key-value heads that several ranks share (`Split.replicated`),
and a tied embedding, of which the first and the last stage of a pipeline each see one use. Their records
(layout/parameters.py) name the groups to sum over. zero.py has summed over data-parallel ranks before; then one
all-reduce for each group sums all of its parts. That takes the same slice of a bucket on all ranks of a group.
Vocabulary tables may differ in size between ranks, so they have buckets of their own, and others do not shift. On one
stage nothing is left to sum for a tied embedding: both of its uses add to one main gradient.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import Kind, slice_ranges
from megalite.layout.parameters import Group, ParameterRecord, ShardBox, is_counted, is_replicated
from megalite.optim.buffers import TrainingBuffers, ranges_of
from megalite.optim.zero import ReplicaGroups

NORM_ROW = 4096  # elements
PIECE = 64 * NORM_ROW  # elements that a CPU takes at once: it copies what it widens


def sum_partial(parts: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum over `group` views of gradient slices of which all its ranks have a part. All of them must call it."""
    total = torch.cat(parts)
    dist.all_reduce(total, group=group)
    for part, whole in zip(parts, total.split([len(part) for part in parts]), strict=True):
        part.copy_(whole)


def partial_gradients(
    buffers: TrainingBuffers, context: ParallelContext
) -> list[tuple[list[Tensor], dist.ProcessGroup]]:
    """What `sum_partial` sums: over tp, the ends of a pipeline, and the ranks that hold the same key-value heads."""
    found = []
    for name in (*get_args(Group), "kv-replicas"):
        ranges = slice_ranges(buffers.owned, is_replicated if name == "kv-replicas" else partial(_is_partial, name))
        if ranges and (group := context.group(name)) is not None:
            found.append((ranges_of(buffers.gradients, ranges), group))
    return found


def _is_partial(group: Group, record: ParameterRecord, box: ShardBox) -> bool:
    return group in record.partial_over


def owned_for_norm(
    buffers: TrainingBuffers, replicas: Mapping[Kind, ReplicaGroups], *, embeds: bool = True
) -> list[Tensor]:
    """The parts of this rank's gradient slices that it adds to the norm, as few as possible.

    Each element enters the norm once: one tp rank counts a replicated parameter, the first optimizer replica counts
    slices that all replicas own, the stage that `embeds` counts a tied embedding. Padding is zero and may be counted.
    """
    others = slice_ranges(buffers.owned, lambda record, box: not is_counted(record, box, embedding=embeds))
    parts = []
    for number, (bucket, gradients) in enumerate(zip(buffers.layout.buckets, buffers.gradients, strict=True)):
        if replicas[bucket.kind].replica > 0:
            continue
        start = 0
        for hole in (each for each in others if each.bucket == number):
            parts.append(gradients[start : hole.start])
            start = hole.stop
        parts.append(gradients[start:])
    return [part for part in parts if len(part)]


def norm_of(parts: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all elements of the (flat) parts together, 0-d fp64; there is at least one part.

    torch's CPU kernel adds all squares in a few fp32 sums, which loses 2 % of the norm at 124 million elements: rows of
    4,096 are exact to 1e-6, and their norms are added in fp64. CUDA's kernel adds in a tree.
    """
    norms: list[Tensor] = []
    for part in parts:
        dtype = torch.promote_types(part.dtype, torch.float32)
        for piece in [part] if part.is_cuda else part.split(PIECE):
            whole = 0 if part.is_cuda else len(piece) // NORM_ROW * NORM_ROW
            norms += [torch.linalg.vector_norm(piece[:whole].view(-1, NORM_ROW), dim=1, dtype=dtype)] if whole else []
            norms += [torch.linalg.vector_norm(piece[whole:], dtype=dtype).view(1)]
    norm: Tensor = torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)
    return norm

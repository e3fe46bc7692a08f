"""Sums the gradients of which several ranks of one model hold a part each, before anything else reads them.

The registry says which these are: norms and biases of what sequence parallelism splits along the sequence, norms over
heads, the key-value heads that several ranks hold (`Split.shared_tail`), and a tied embedding, of which the first and
the last stage of a pipeline each see one use. One collective sums all of a group's together, after the data-parallel
sums. Each rank adds what it owns of them, which is the same part on all ranks of the group: the tables of the
vocabulary, which may be cut unevenly and are tied, have buckets of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import BufferSlot, box_ranges
from megalite.layout.parameters import Group, ShardBox
from megalite.optim.buffers import TrainingBuffers, ranges_of


@dataclass(frozen=True)
class PartialGradients:
    """Views of this rank's gradient slices, of which each rank of `group` has a part of the sum."""

    parts: Sequence[Tensor]
    group: dist.ProcessGroup

    def all_reduce(self) -> None:
        """Every part becomes the whole, on all ranks of the group. All of them must call it."""
        total = torch.cat(list(self.parts))
        dist.all_reduce(total, group=self.group)
        for part, whole in zip(self.parts, total.split([len(part) for part in self.parts]), strict=True):
            part.copy_(whole)


def partial_gradients(buffers: TrainingBuffers, context: ParallelContext) -> list[PartialGradients]:
    """What is summed over tp, over the ends of a pipeline, and over the ranks that hold the same key-value heads."""
    owned = buffers.owned
    ranges = {name: box_ranges(owned, partial(_is_partial, name)) for name in get_args(Group)}
    ranges["kv-replicas"] = box_ranges(owned, lambda slot, box: slot.record.split is not None and box.replicas > 1)
    found = []
    for name, of_group in ranges.items():
        if parts := ranges_of(buffers.gradients, of_group):
            group = context.group(name)  # asserts that something travels over it
            found += [PartialGradients(parts, group)] if group is not None else []
    return found


def _is_partial(group: Group, slot: BufferSlot, box: ShardBox) -> bool:
    return group in slot.record.partial_over

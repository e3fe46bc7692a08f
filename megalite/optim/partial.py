"""Gradients of which several ranks of one model hold a part each are summed before anybody looks at them.

Which those are the registry says: norms and biases of what sequence parallelism splits along the sequence, norms over
heads, the key-value heads that several ranks hold (`Split.shared_tail`), and a tied embedding, of which the first and
the last stage of a pipeline each see one use. One collective sums all of a group's together, after the data-parallel
sums. Each rank adds what it owns of them, which is the same part on all ranks of the group: the tables of the
vocabulary, which may be cut unevenly and are tied, have buckets of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.optim.buffer_layout import box_ranges
from megalite.optim.buffers import TrainingBuffers, ranges_of
from megalite.parallel.context import ParallelContext


@dataclass(frozen=True)
class PartialGradients:
    """Views of the gradient slices and the groups over which they are summed; a group is None where it has one rank."""

    over_tp: Sequence[Tensor]
    tp: dist.ProcessGroup | None
    over_replicas: Sequence[Tensor]
    replicas: dist.ProcessGroup | None
    over_stages: Sequence[Tensor]
    stages: dist.ProcessGroup | None

    @classmethod
    def of(cls, buffers: TrainingBuffers, context: ParallelContext) -> "PartialGradients":
        partial = box_ranges(buffers.owned, lambda slot, _: "tp" in slot.record.partial_over)
        tied = box_ranges(buffers.owned, lambda slot, _: "embedding" in slot.record.partial_over)
        shared = box_ranges(buffers.owned, lambda slot, box: slot.record.split is not None and box.replicas > 1)
        return cls(
            ranges_of(buffers.gradients, partial),
            context.group("tp"),
            ranges_of(buffers.gradients, shared),
            context.group("kv-replicas"),
            ranges_of(buffers.gradients, tied),
            context.group("embedding"),
        )

    def sum(self) -> None:
        """Every part becomes the whole, on all ranks of its group. All of them must call it."""
        of_tp, of_replicas = (self.over_tp, self.tp), (self.over_replicas, self.replicas)
        for parts, group in (of_tp, of_replicas, (self.over_stages, self.stages)):
            if parts and group is not None:
                total = torch.cat(list(parts))
                dist.all_reduce(total, group=group)
                for part, whole in zip(parts, total.split([len(part) for part in parts]), strict=True):
                    part.copy_(whole)

"""Gradients of which each tensor-parallel rank holds a part are summed before anybody looks at them.

Which those are the registry says: norms and biases of what sequence parallelism splits along the sequence, norms over
heads, and the key-value heads that several ranks hold (`Split.shared_tail`). They are few and small: one collective
sums all of a group's together, after the last microbatch's backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.optim.buffers import TrainingBuffers
from megalite.parallel.context import ParallelContext


@dataclass(frozen=True)
class PartialGradients:
    """Views of the gradient buffer and the groups over which they are summed; a group is None where it has one rank."""

    over_tp: Sequence[Tensor]
    tp: dist.ProcessGroup | None
    over_replicas: Sequence[Tensor]
    replicas: dist.ProcessGroup | None

    @classmethod
    def of(cls, buffers: TrainingBuffers, context: ParallelContext) -> "PartialGradients":
        layout, gradients = buffers.layout, buffers.gradients
        over_tp = [slot.view(gradients) for slot in layout.slots if "tp" in slot.record.partial_over]
        return cls(over_tp, context.group("tp"), layout.shared_tails(gradients), context.group("kv-replicas"))

    def sum(self) -> None:
        """Every part becomes the whole, on all ranks of its group. All of them must call it."""
        for parts, group in ((self.over_tp, self.tp), (self.over_replicas, self.replicas)):
            if parts and group is not None:
                total = torch.cat([part.flatten() for part in parts])
                dist.all_reduce(total, group=group)
                for part, whole in zip(parts, total.split([part.numel() for part in parts]), strict=True):
                    part.copy_(whole.view(part.shape))

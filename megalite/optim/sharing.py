"""Which ranks share the optimizer's state, and which repeat it.

Ranks that hold the same parameters (dp x cp, of experts edp) are cut into instances. Inside one each rank owns a slice
of every bucket (ZeRO-1, Rajbhandari et al. 2019); ranks at the same place of different instances own the same slices,
whose gradients are summed across (hybrid sharding). Without sharding every rank is an instance of its own.
"""

from dataclasses import dataclass

import torch.distributed as dist

from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import Kind


@dataclass(frozen=True)
class Sharing:
    """One rank's groups. A group of one rank is None.

    `shard_group`: the ranks of its instance, each of which owns a slice (rank_buffers.py says which).
    `replicate_group`: the ranks with the same slices, of which it is number `repeat`.
    """

    shard_group: dist.ProcessGroup | None = None
    replicate_group: dist.ProcessGroup | None = None
    repeat: int = 0

    @classmethod
    def of(cls, context: ParallelContext, kind: Kind, *, zero: bool) -> "Sharing":
        """For the dense parameters or the experts of this rank."""
        replicas = "dp-cp" if kind == "dense" else "edp"
        if kind == "expert" and not context.layout.has_experts:
            return cls()
        if not zero:
            return cls(None, context.group(replicas), context.index(replicas))
        shard, replicate = f"{replicas}-shard", f"{replicas}-replicate"
        if shard not in context.specs:  # one instance
            return cls(context.group(replicas))
        return cls(context.group(shard), context.group(replicate), context.index(replicate))

    @classmethod
    def of_rank(cls, context: ParallelContext, *, zero: bool) -> dict[Kind, "Sharing"]:
        """By kind of parameters."""
        return {"dense": cls.of(context, "dense", zero=zero), "expert": cls.of(context, "expert", zero=zero)}

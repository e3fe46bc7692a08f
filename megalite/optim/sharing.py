"""Which ranks share the optimizer's state, and which repeat it.

Ranks that hold the same parameters (dp x cp, of experts edp) are cut into instances. Inside one each rank owns a slice
of every bucket (ZeRO-1, Rajbhandari et al. 2019); ranks at the same place of different instances own the same slices,
whose gradients are summed across (hybrid sharding). Without sharding every rank is an instance of its own.
"""

from dataclasses import dataclass

import torch.distributed as dist

from megalite.optim.buffer_layout import Kind
from megalite.parallel.context import ParallelContext


@dataclass(frozen=True)
class Sharing:
    """One rank's place: `inside` its instance are `shards` ranks, of which it is number `index`; `across` are those
    with the same slices, of which it is number `repeat`. A group of one rank is None."""

    inside: dist.ProcessGroup | None = None
    shards: int = 1
    index: int = 0
    across: dist.ProcessGroup | None = None
    repeat: int = 0

    @classmethod
    def of(cls, context: ParallelContext, kind: Kind, *, zero: bool) -> "Sharing":
        """For the dense parameters or the experts of this rank."""
        replicas = "dp-cp" if kind == "dense" else "edp"
        if kind == "expert" and not context.layout.has_experts:
            return cls()
        if not zero:
            return cls(across=context.group(replicas), repeat=context.index(replicas))
        inside, across = f"{replicas}-instance", f"{replicas}-across"
        if inside not in context.specs:  # one instance
            return cls(context.group(replicas), context.size(replicas), context.index(replicas))
        return cls(
            context.group(inside),
            context.size(inside),
            context.index(inside),
            context.group(across),
            context.index(across),
        )

    @classmethod
    def of_rank(cls, context: ParallelContext, *, zero: bool) -> dict[Kind, "Sharing"]:
        """By kind of parameters."""
        return {"dense": cls.of(context, "dense", zero=zero), "expert": cls.of(context, "expert", zero=zero)}

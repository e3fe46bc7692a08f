"""Which ranks share the optimizer's state, and which repeat it.

Ranks that hold the same parameters (dp x cp, of experts edp) are cut into instances. Inside one each rank owns a slice
of every bucket (ZeRO-1, Rajbhandari et al. 2019); ranks at the same place of different instances own the same slices,
whose gradients are summed across (hybrid sharding). Without sharding every rank is an instance of its own.
"""

from dataclasses import dataclass

import torch.distributed as dist

from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import Kind
from megalite.optim.rank_buffers import kinds_of, sharing_groups


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
    def of_rank(cls, context: ParallelContext, *, zero: bool, instances: int = 1) -> dict[Kind, "Sharing"]:
        """By kind of parameters."""
        sharing: dict[Kind, Sharing] = {"dense": cls(), "expert": cls()}
        for kind in kinds_of(context.layout):
            shard, same = sharing_groups(kind, zero=zero, instances=instances)
            shard_group, replicate_group = (context.group(name) if name else None for name in (shard, same))
            sharing[kind] = cls(shard_group, replicate_group, context.index(same) if same else 0)
        return sharing

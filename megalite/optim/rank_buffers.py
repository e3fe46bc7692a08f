"""The buffers of any rank of any world, from the config alone: what training lays out there. No torch import."""

from dataclasses import dataclass

from megalite.config.layout import stage_settings
from megalite.config.schema import Config
from megalite.layout.buffer_layout import BufferLayout, Kind, OwnedRange, buffer_layout
from megalite.layout.groups import GroupNeeds, groups_of
from megalite.layout.parameters import ParameterRecord, held_parameters
from megalite.layout.ranks import ParallelLayout
from megalite.layout.stages import stages_of
from megalite.model.parameters import gpt_parameters

KINDS: tuple[Kind, ...] = ("dense", "expert")


@dataclass(frozen=True)
class RankBuffers:
    """Buffers of `rank`. `owners`: the ranks that share the optimizer's state with it, in the order of their slices."""

    rank: int
    layout: BufferLayout
    owners: dict[Kind, tuple[int, ...]]

    @property
    def index(self) -> dict[Kind, int]:
        """Which slice of every bucket is the rank's own, by kind of parameters."""
        return {kind: ranks.index(self.rank) for kind, ranks in self.owners.items()}

    @property
    def owned(self) -> tuple[OwnedRange, ...]:
        return self.layout.owned(self.index["dense"], self.index["expert"])


def rank_buffers(config: Config, world: ParallelLayout, rank: int) -> RankBuffers:
    """`config` is resolved for `world`, its vocabulary included."""
    zero, instances, at = config.optimizer.zero > 0, config.optimizer.instances, world.coordinates(rank)
    groups = groups_of(world, rank, GroupNeeds(optimizer_instances=instances if zero else 1))
    owners: dict[Kind, tuple[int, ...]] = {}
    for kind in KINDS:
        shard, _ = replica_groups(kind, zero=zero, instances=instances)
        owners[kind] = (groups[shard].ranks if shard else ()) or (rank,)
    layout = buffer_layout(
        records_of(config, at["pp"]),
        tp=(world.tp, at["tp"]),
        etp=(world.etp or 1, at.get("etp", 0)),
        ep=(world.ep, at.get("ep", 0)),
        dense_shards=len(owners["dense"]),
        expert_shards=len(owners["expert"]),
        bucket_size=config.optimizer.bucket_size,
        ownership="whole" if config.optimizer.ownership == "whole" else "even",
    )
    return RankBuffers(rank, layout, owners)


def records_of(config: Config, pp_rank: int) -> list[ParameterRecord]:
    """The records of what one pipeline rank holds, chunk by chunk."""
    records = gpt_parameters(config.model, sequence_parallel=bool(config.parallel.sequence_parallel))
    return held_parameters(records, stages_of(stage_settings(config), pp_rank))


def replica_groups(kind: Kind, *, zero: bool, instances: int) -> tuple[str | None, str | None]:
    """The groups whose ranks each own a slice of the optimizer's state, and whose ranks own the same slices."""
    replicas = "dp-cp" if kind == "dense" else "edp"
    if not zero:
        return None, replicas
    return (replicas, None) if instances == 1 else (f"{replicas}-shard", f"{replicas}-replicate")

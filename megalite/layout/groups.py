"""Which groups of ranks exchange what: the process groups of one rank, as plain records in the order of their making.

Every rank makes its groups in this one order. Groups with equal members share a communicator only within one class of
traffic: a communicator performs its collectives one after the other, in the order in which each rank issues them, so
sharing it across classes would queue a tensor-parallel reduction behind a gradient bucket, and deadlock where two ranks
interleave the classes differently. No torch import.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Literal

from megalite.layout.ranks import ParallelLayout

Traffic = Literal[
    "gradient",  # gradient and parameter sync, and the sums of a step's end: norms, token counts
    "tensor",  # activations inside a layer
    "context",  # keys and values between the parts of a sequence
    "expert",  # tokens to experts and back
    "forward",  # activations to the next pipeline stage
    "backward",  # their gradients to the previous one
    "saving",  # host-side traffic of a checkpoint that is written behind training, from a thread of its own
]
WORLD = "tp-cp-dp-pp"  # the axes whose one group is all ranks
COMMUNICATING = (  # groups over which something travels; the others are lists of ranks
    *("dp-cp", "dp-cp-shard", "dp-cp-replicate", "edp", "edp-shard", "edp-replicate", "world"),
    *("tp", "kv-replicas", "pp-forward", "pp-backward", "embedding", "saving"),
)


@dataclass(frozen=True)
class GroupSpec:
    """One group that a rank belongs to: `ranks` ascend. `options` names the entry of the NCCL options file."""

    name: str
    traffic: Traffic
    ranks: tuple[int, ...]
    options: str

    @property
    def communicates(self) -> bool:
        """Whether it has a communicator, where it has more than one rank."""
        return self.name in COMMUNICATING

    @property
    def on_host(self) -> bool:
        """Whether what it carries lies in host memory, whatever the device."""
        return self.traffic == "saving"


@dataclass(frozen=True)
class GroupNeeds:
    """What besides the layout decides which groups there are.

    `kv_heads`: None, or the model's key-value heads (fewer than tp: ranks share one). `split_rank`: None, or the
    pipeline rank of an encoder-decoder's first decoder stage. `optimizer_instances`: the optimizer's state is sharded
    inside each of so many slices of dp x cp and repeated across them. `cp_levels`: sizes of hierarchical context
    parallelism, innermost first; their product is cp. `background_saving`: checkpoints are written behind training.
    """

    tied_embeddings: bool = False
    kv_heads: int | None = None
    split_rank: int | None = None
    optimizer_instances: int = 1
    cp_levels: tuple[int, ...] = ()
    background_saving: bool = False


def groups_of(layout: ParallelLayout, rank: int, needs: GroupNeeds) -> dict[str, GroupSpec]:
    """The groups of `rank` by name, groups of one rank included, in the order of their making.

    Raises ValueError where they cannot be formed.
    """
    _check(layout, needs)
    specs = {family.name: family.group_of(rank) for family in _families(layout, needs)}
    return {name: spec for name, spec in specs.items() if spec is not None}


def all_groups(layout: ParallelLayout, needs: GroupNeeds) -> Iterator[GroupSpec]:
    """Every group of more than one rank of the whole world, in the one order in which all ranks make them.

    Gradient sync comes first: switches that reduce in the network serve the first communicator alone. The call raises
    ValueError where they cannot be formed.
    """
    _check(layout, needs)
    return _all_groups(layout, needs)


def _all_groups(layout: ParallelLayout, needs: GroupNeeds) -> Iterator[GroupSpec]:
    first = layout.rank_offset
    for family in _families(layout, needs):
        largest = family.group_of(first)  # of the first stage, where groups of several sizes have all their members
        if largest is None or len(largest.ranks) == 1:
            continue
        seen: set[int] = set()
        for rank in range(first, first + layout.world_size):
            spec = None if rank in seen else family.group_of(rank)
            if spec is not None:
                seen.update(spec.ranks)
                yield spec


def _check(layout: ParallelLayout, needs: GroupNeeds) -> None:
    heads, instances, levels, split = needs.kv_heads, needs.optimizer_instances, needs.cp_levels, needs.split_rank
    if heads is not None and (heads < 1 or (layout.tp % heads and heads % layout.tp)):
        raise ValueError(f"kv_heads={heads} is neither a multiple nor a divisor of tp={layout.tp}")
    if levels and prod(levels) != layout.cp:
        raise ValueError(f"the product of cp_levels={levels} must be cp={layout.cp}")
    if split is not None and not 0 < split < layout.pp:
        raise ValueError(f"split_rank={split} must leave encoder and decoder a rank each of pp={layout.pp}")
    if instances < 1 or any(
        size % instances for size in (layout.dp * layout.cp, *([layout.edp] if layout.has_experts else []))
    ):
        raise ValueError(
            f"optimizer_instances={instances} must divide dp x cp = {layout.dp * layout.cp} and the "
            f"replicas of experts, {layout.edp}"
        )
    if layout.has_experts and instances > 1 and not _instances_agree(layout, instances):
        raise ValueError(f"order={layout.order} deals dense layers and experts out to different optimizer instances")


@dataclass(frozen=True)
class _Family:
    """All groups of one name: `members` gives a rank's group, empty where it belongs to none."""

    name: str
    traffic: Traffic
    members: Callable[[int], list[int]]
    options: str | None = None

    def group_of(self, rank: int) -> GroupSpec | None:
        ranks = self.members(rank)
        return GroupSpec(self.name, self.traffic, tuple(ranks), self.options or self.name) if ranks else None


def _families(layout: ParallelLayout, needs: GroupNeeds) -> Iterator[_Family]:
    def along(axes: str) -> Callable[[int], list[int]]:
        return lambda rank: layout.group_of(rank, axes)

    experts = layout.has_experts
    for axes in ("dp-cp", "dp", "edp") if experts else ("dp-cp", "dp"):
        yield _Family(axes, "gradient", along(axes))
    if needs.optimizer_instances > 1:
        yield from _instances(layout, needs.optimizer_instances)
    for axes in ("tp-pp", "tp-dp", "tp-dp-cp", "etp-ep-pp") if experts else ("tp-pp", "tp-dp", "tp-dp-cp"):
        yield _Family(axes, "gradient", along(axes))
    yield _Family("world", "gradient", along(WORLD))
    if needs.kv_heads is not None and needs.kv_heads < layout.tp:
        sharing = layout.tp // needs.kv_heads
        yield _Family("kv-replicas", "gradient", lambda rank: _slice_of(layout.group_of(rank, "tp"), rank, sharing))
    yield _Family("tp", "tensor", along("tp"))
    yield _Family("tp-cp", "tensor", along("tp-cp"))
    yield _Family("cp", "context", along("cp"))
    yield from _context_levels(layout, needs.cp_levels)
    for axes in ("ep", "etp", "etp-ep") if experts else ():
        yield _Family(axes, "expert", along(axes))
    # One communicator per direction: an activation must not wait for the gradient that comes the other way.
    yield _Family("pp-forward", "forward", along("pp"), "pp")
    yield _Family("pp-backward", "backward", along("pp"), "pp")
    if needs.background_saving:
        yield _Family("saving", "saving", along(WORLD))
    yield _Family("embedding", "gradient", lambda rank: _embedding_stages(layout, rank, needs))
    untied = replace(needs, tied_embeddings=False)
    yield _Family("position-embedding", "gradient", lambda rank: _embedding_stages(layout, rank, untied))


def _instances(layout: ParallelLayout, instances: int) -> Iterator[_Family]:
    """Inside an instance the ranks that share its optimizer state, across instances those with the same shard."""

    def inside(rank: int, axes: str) -> list[int]:
        replicas = layout.group_of(rank, axes)
        return _slice_of(replicas, rank, len(replicas) // instances)

    def across(rank: int, axes: str) -> list[int]:
        replicas = layout.group_of(rank, axes)
        size = len(replicas) // instances
        return replicas[replicas.index(rank) % size :: size]

    for axes in ("dp-cp", "edp") if layout.has_experts else ("dp-cp",):
        yield _Family(f"{axes}-shard", "gradient", partial(inside, axes=axes))
        yield _Family(f"{axes}-replicate", "gradient", partial(across, axes=axes))
    yield _Family("instance", "gradient", lambda rank: _instance_of(layout, rank, instances, "dp-cp", "tp-pp"))


def _instance_of(layout: ParallelLayout, rank: int, instances: int, replicas: str, model: str) -> list[int]:
    """All ranks of the optimizer instance of `rank`: for its slice of the replicas, all of their model's ranks."""
    group = layout.group_of(rank, replicas)
    slice_ = _slice_of(group, rank, len(group) // instances)
    return sorted(member for replica in slice_ for member in layout.group_of(replica, model))


def _instances_agree(layout: ParallelLayout, instances: int) -> bool:
    """Whether the slices of dp x cp and those of edp make the same ranks one instance."""
    replicas = layout.group_of(layout.rank_offset, "dp-cp")
    firsts = replicas[:: len(replicas) // instances]
    return all(
        _instance_of(layout, first, instances, "dp-cp", "tp-pp")
        == _instance_of(layout, first, instances, "edp", "etp-ep-pp")
        for first in firsts
    )


def _context_levels(layout: ParallelLayout, sizes: tuple[int, ...]) -> Iterator[_Family]:
    """Level by level from neighbours outwards: positions along cp that differ in one digit, base `sizes`."""

    def level_of(rank: int, stride: int, size: int) -> list[int]:
        cp = layout.group_of(rank, "cp")
        at = cp.index(rank)
        first = at - at // stride % size * stride
        return cp[first : first + size * stride : stride]

    stride = 1
    for level, size in enumerate(sizes):
        yield _Family(f"cp-level-{level}", "context", partial(level_of, stride=stride, size=size), "cp-levels")
        stride *= size


def _embedding_stages(layout: ParallelLayout, rank: int, needs: GroupNeeds) -> list[int]:
    """The stages with a copy of the embedding: the first, an encoder-decoder's split and, where tied, the last."""
    pipeline = layout.group_of(rank, "pp")
    stages = {pipeline[0]}
    if needs.split_rank is not None:
        stages.add(pipeline[needs.split_rank])
    if needs.tied_embeddings:
        stages.add(pipeline[-1])
    return sorted(stages) if rank in stages else []


def _slice_of(ranks: list[int], rank: int, size: int) -> list[int]:
    """The slice with `rank` of `ranks` cut into slices of `size`."""
    first = ranks.index(rank) // size * size
    return ranks[first : first + size]

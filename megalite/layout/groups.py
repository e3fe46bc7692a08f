"""Which groups of ranks exchange what: the process groups of one rank, as plain records in the order of their making.

Groups with equal members share a communicator only within one class of traffic: a communicator performs its collectives
one after the other, in the order in which each rank issues them, so sharing it across classes would queue a
tensor-parallel reduction behind a gradient bucket, and deadlock where two ranks interleave the classes differently.
Ranks that only need to be known (`ParallelLayout.groups`) are no group here. No torch import.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from megalite.layout.ranks import ParallelLayout

Traffic = Literal[
    "gradient",  # gradient and parameter sync, and the sums of a step's end: norms, token counts
    "tensor",  # activations inside a layer
    "forward",  # activations to the next pipeline stage
    "backward",  # their gradients to the previous one
    "saving",  # host-side traffic of a checkpoint that is written behind training, from a thread of its own
]
Members = Callable[[int], list[int]]  # the group of a rank, ascending; empty where it belongs to none
WORLD = "tp-cp-dp-pp"  # the axes whose one group is all ranks


@dataclass(frozen=True)
class GroupSpec:
    """One group that a rank belongs to: `ranks` ascend; none where the rank is in no group of this name."""

    name: str
    traffic: Traffic
    ranks: tuple[int, ...]

    @property
    def options(self) -> str:
        """The name by which the NCCL options file knows it: both directions of a pipeline are "pp"."""
        return "pp" if self.traffic in ("forward", "backward") else self.name


@dataclass(frozen=True)
class GroupNeeds:
    """What besides the layout decides which groups there are. That sizes divide is a config rule."""

    tied_embeddings: bool = False
    kv_heads: int | None = None  # of the model: with fewer than tp, ranks share one
    optimizer_instances: int = 1  # slices of dp x cp (of experts, edp) that repeat the optimizer's state
    context_ring: int = 1  # of cp = ring x alltoall: its ranks pass keys and values round, neighbours exchange heads
    background_saving: bool = False  # checkpoints are written behind training


def groups_of(layout: ParallelLayout, rank: int, needs: GroupNeeds) -> dict[str, GroupSpec]:
    """The groups of `rank` by name, in the order of their making; those of one rank and of none included."""
    table = _table(layout, needs).items()
    return {name: GroupSpec(name, traffic, tuple(members(rank))) for name, (traffic, members) in table}


def all_groups(layout: ParallelLayout, needs: GroupNeeds) -> Iterator[GroupSpec]:
    """Every group of more than one rank of the whole world, in the one order in which all ranks make them."""
    for name, (traffic, members) in _table(layout, needs).items():
        seen: set[int] = set()
        for rank in range(layout.world_size if len(members(0)) > 1 else 0):  # the first rank's group is the largest
            if rank not in seen and (ranks := members(rank)):
                seen.update(ranks)
                yield GroupSpec(name, traffic, tuple(ranks))


def _table(layout: ParallelLayout, needs: GroupNeeds) -> dict[str, tuple[Traffic, Members]]:
    """All groups by name. Gradient sync comes first: switches that reduce in the network serve the first communicator
    alone. A further group of an axis is one more line."""

    def along(axes: str, slices: int = 1, *, across: bool = False, wanted: bool = True) -> Members:
        """The group along axes, cut into slices of neighbours; `across`: the ranks at one place of all slices."""

        def members(rank: int) -> list[int]:
            if not wanted:
                return []
            ranks = layout.group_of(rank, axes)
            assert len(ranks) % slices == 0, f"{len(ranks)} ranks do not divide into {slices} slices"
            size, at = len(ranks) // slices, ranks.index(rank)
            return ranks[at % size :: size] if across else ranks[at // size * size :][:size]

        return members

    def embedding(rank: int) -> list[int]:
        """The stages of the pipeline of `rank` that hold a copy of the word embedding, if it is on one of them."""
        pipeline = layout.group_of(rank, "pp")
        stages = {pipeline[0], pipeline[-1 if needs.tied_embeddings else 0]}
        return sorted(stages) if rank in stages else []

    experts, instances = layout.has_experts, needs.optimizer_instances
    sliced, kv_heads = instances > 1, min(needs.kv_heads or layout.tp, layout.tp)
    return {
        "dp-cp": ("gradient", along("dp-cp")),
        "edp": ("gradient", along("edp", wanted=experts)),
        "dp-cp-shard": ("gradient", along("dp-cp", instances, wanted=sliced)),
        "dp-cp-replicate": ("gradient", along("dp-cp", instances, across=True, wanted=sliced)),
        "edp-shard": ("gradient", along("edp", instances, wanted=sliced and experts)),
        "edp-replicate": ("gradient", along("edp", instances, across=True, wanted=sliced and experts)),
        "world": ("gradient", along(WORLD)),
        "kv-replicas": ("gradient", along("tp", kv_heads)),
        "tp": ("tensor", along("tp")),
        "cp-alltoall": ("tensor", along("cp", needs.context_ring)),
        "cp-ring": ("tensor", along("cp", needs.context_ring, across=True)),
        "tp-cp": ("tensor", along("tp-cp", wanted=experts and layout.cp > 1)),
        "etp-ep": ("tensor", along("etp-ep", wanted=experts)),
        # One communicator per direction: an activation must not wait for the gradient that comes the other way.
        "pp-forward": ("forward", along("pp")),
        "pp-backward": ("backward", along("pp")),
        "saving": ("saving", along(WORLD, wanted=needs.background_saving)),
        "word-embedding": ("gradient", embedding),
    }

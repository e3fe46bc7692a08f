"""Which rank computes what, and which groups of ranks exchange what: axes, coordinates and groups, as pure numbers.

Ranks are the mixed-radix numbers over `order`, leftmost axis fastest (Megatron-LM's convention): with the default
`tp-cp-ep-dp-pp`, neighbouring ranks share a tensor-parallel group. One world is numbered twice: attention and dense
layers live on tp x cp x dp x pp, experts on etp x ep x edp x pp, in the same order with etp at tp's place and edp at
dp's. So ep may span tp, cp and dp ("folding", arXiv 2504.14960); only the pipelines must be the same. No torch import.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
EXPERT_NAME = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}  # the axis of the experts at the place of an axis
# A communicator performs its collectives one after the other, in the order in which each rank issues them. Groups with
# equal members share one within a class of traffic alone: else two ranks that interleave the classes would deadlock.
Traffic = Literal[
    "gradient",  # gradient and parameter sync, and the sums of a step's end: norms, token counts
    "tensor",  # activations inside a layer
    "forward",  # activations to the next pipeline stage
    "backward",  # their gradients to the previous one
    "saving",  # host-side traffic of a checkpoint that is written behind training, from a thread of its own
]
Members = Callable[[int], list[int]]  # the group of a rank, ascending; empty where it belongs to none
WORLD = "tp-cp-dp-pp"  # the axes whose one group is all ranks


def strides_of(order: str, sizes: Mapping[str, int], axes: Sequence[str]) -> dict[str, int]:
    """The distance in ranks between neighbours along each of the dense or the experts' `axes`. Axes that `order` leaves
    out follow at the end. The two numberings have the same pipelines exactly if their strides of pp are equal."""
    strides, distance = {}, 1
    for place in dict.fromkeys([*order.split("-"), *DEFAULT_ORDER.split("-")]):
        axis = place if axes is DENSE_AXES else EXPERT_NAME.get(place, "")
        if axis in axes:
            strides[axis], distance = distance, distance * sizes[axis]
    return strides


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of all axes over one world. `etp` is None for a dense model, which has no expert axes. What a user asks for
    passes `config.rules.LAYOUT_RULES` first."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        given = (self.tp, self.cp, self.dp, self.pp, self.vpp, self.ep, self.sizes["etp"])
        assert min(given) >= 1, self
        assert self.ep == 1 or self.has_experts, f"ep needs etp, the tensor-parallel size of an expert: {self}"
        if self.has_experts:
            assert prod(self.sizes[axis] for axis in EXPERT_AXES) == self.world_size, f"experts do not fill: {self}"
            dense, expert = (strides_of(self.order, self.sizes, axes)["pp"] for axes in (DENSE_AXES, EXPERT_AXES))
            assert dense == expert or self.pp == 1, f"stages are {dense} ranks apart, those of experts {expert}: {self}"

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def has_experts(self) -> bool:
        return self.etp is not None

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of all axes; in a dense model those of the experts are 1. edp, the replicas of each expert, is what
        etp, ep and pp leave of the world."""
        etp = 1 if self.etp is None else self.etp
        edp = 1 if self.etp is None else self.world_size // max(1, etp * self.ep * self.pp)
        dense = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return dense | {"etp": etp, "ep": self.ep, "edp": edp}

    @cached_property
    def strides(self) -> dict[str, int]:
        """The distance in ranks between neighbours along each axis, with those of the experts if there are any."""
        known = (DENSE_AXES, EXPERT_AXES) if self.has_experts else (DENSE_AXES,)
        return {axis: stride for axes in known for axis, stride in strides_of(self.order, self.sizes, axes).items()}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` along every axis, with those of the experts if there are any."""
        assert 0 <= rank < self.world_size, (rank, self)
        return {axis: rank // stride % self.sizes[axis] for axis, stride in self.strides.items()}

    def groups(self, axes: str) -> list[list[int]]:
        """All groups of an axis or of several axes of one numbering ("tp", "dp-cp", "etp-ep-pp"): ranks that differ in
        nothing but their position along them. Members ascend, and groups by their first members."""
        groups, seen = [], set[int]()
        for rank in range(self.world_size):
            if rank not in seen:
                groups.append(self.group_of(rank, axes))
                seen.update(groups[-1])
        return groups

    def group_of(self, rank: int, axes: str) -> list[int]:
        """The group of `rank` among `groups(axes)`, at the cost of its own size."""
        named = axes.split("-")
        assert any({*named} <= {*numbering} for numbering in (DENSE_AXES, EXPERT_AXES)), f"no groups of {axes}"
        members = [rank - sum(rank // self.strides[axis] % self.sizes[axis] * self.strides[axis] for axis in named)]
        for axis in sorted(named, key=self.strides.__getitem__):
            members = [at * self.strides[axis] + member for at in range(self.sizes[axis]) for member in members]
        return members


def header_lines(layout: ParallelLayout) -> list[str]:
    """One or two lines about a layout of any size: the axes, and those of the experts."""
    ranks = f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''}"
    split = {axis: str(size) for axis, size in layout.sizes.items() if size > 1}
    chunks = {"pp": f" (vpp {layout.vpp})"} if layout.vpp > 1 else {}
    dense, expert = (
        " x ".join(f"{axis} {split[axis]}{chunks.get(axis, '')}" for axis in axes if axis in split)
        for axes in (DENSE_AXES, EXPERT_AXES)
    )
    order = f", order {layout.order}" if " x " in dense or " x " in expert else ""
    axes = f"{ranks}: {dense}" if dense else ranks
    return [axes + order, *([f"experts: {expert or ranks}"] if layout.has_experts else [])]


@dataclass(frozen=True)
class GroupSpec:
    """One group that a rank belongs to: `ranks` ascend; none where the rank is in no group of this name."""

    name: str
    traffic: Traffic
    ranks: tuple[int, ...]


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
    alone. A further group of an axis is one more line. Ranks that only need to be known are no group here."""

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

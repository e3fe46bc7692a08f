"""Which rank computes what: sizes of the axes, coordinates of a rank and the groups of ranks, as pure numbers.

Ranks are the mixed-radix numbers over `order`, leftmost axis fastest (Megatron-LM's convention): with the default
`tp-cp-ep-dp-pp`, neighbouring ranks share a tensor-parallel group. One world is numbered twice: attention and dense
layers live on tp x cp x dp x pp, experts on etp x ep x edp x pp, in the same order with etp at tp's place and edp at
dp's. So ep may span tp, cp and dp ("folding", arXiv 2504.14960); only the pipelines must be the same. No torch import.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
EXPERT_NAME = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}  # the axis of the experts at the place of an axis


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

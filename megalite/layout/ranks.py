"""Which rank computes what: sizes of the axes, coordinates of a rank and the groups of ranks, as pure numbers.

Ranks are the mixed-radix numbers over `order`, leftmost axis fastest (Megatron-LM's convention): with the default
`tp-cp-ep-dp-pp`, neighbouring ranks share a tensor-parallel group. Two generators number one world: attention and dense
layers live on tp x cp x dp x pp, experts on etp x ep x edp x pp, in the same order with etp at tp's place and edp at
dp's. So ep may span tp, cp and dp ("folding", arXiv 2504.14960); only the pipelines must be the same. No torch import.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
DENSE_NAME = {axis: axis for axis in DENSE_AXES}
EXPERT_NAME = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}  # the axis of the experts at the place of an axis


@dataclass(frozen=True)
class RankGenerator:
    """One numbering of a world: `sizes` holds (axis, size), fastest-varying first."""

    sizes: tuple[tuple[str, int], ...]

    @cached_property
    def strides(self) -> dict[str, int]:
        """The distance in ranks between neighbours along each axis."""
        return {axis: prod(size for _, size in self.sizes[:at]) for at, (axis, _) in enumerate(self.sizes)}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` along every axis."""
        assert 0 <= rank < prod(size for _, size in self.sizes), (rank, self)
        return {axis: rank // self.strides[axis] % size for axis, size in self.sizes}

    def groups(self, axes: str) -> list[list[int]]:
        """All groups of an axis, or of several ("tp-dp"): ranks that differ in nothing but their position along them.

        Members and groups alike are listed with the axis that is leftmost in the order varying fastest, however `axes`
        is written; so members ascend.
        """
        firsts = self._offsets([axis for axis in self.strides if axis not in axes.split("-")])
        members = self._offsets(axes.split("-"))
        return [[first + member for member in members] for first in firsts]

    def group_of(self, rank: int, axes: str) -> list[int]:
        """The group of `rank` among `groups(axes)`, at the cost of its own size."""
        named, at = axes.split("-"), self.coordinates(rank)
        first = rank - sum(at[axis] * self.strides[axis] for axis in named)
        return [first + member for member in self._offsets(named)]

    def _offsets(self, axes: list[str]) -> list[int]:
        """Distances of all positions along `axes` from their origin, ascending."""
        offsets = [0]
        for axis, size in self.sizes:
            if axis in axes:
                offsets = [at * self.strides[axis] + offset for at in range(size) for offset in offsets]
        return offsets


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of all axes over one world. `etp` is None for a dense model, which has no expert axes.

    Sizes that a user gave go through `config.parallel_rules.checked_layout`, which refuses what cannot be laid out;
    here that is a mistake of ours.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        given = (self.tp, self.cp, self.dp, self.pp, self.vpp, self.ep, 1 if self.etp is None else self.etp)
        assert min(given) >= 1, self
        assert self.ep == 1 or self.has_experts, f"ep needs etp, the tensor-parallel size of an expert: {self}"
        if self.has_experts:
            assert prod(self.sizes[axis] for axis in EXPERT_AXES) == self.world_size, f"experts do not fill: {self}"
            dense, expert = pipeline_strides(self.order, self.sizes)
            assert dense == expert or self.pp == 1, f"stages are {dense} ranks apart, those of experts {expert}: {self}"

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def has_experts(self) -> bool:
        return self.etp is not None

    @property
    def edp(self) -> int:
        """Replicas of each expert: what etp, ep and pp leave of the world. 1 for a dense model."""
        return self.sizes["edp"]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of all axes, those of the experts included: they are 1 in a dense model."""
        edp = 1 if self.etp is None else self.world_size // (self.etp * self.ep * self.pp)
        dense = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return dense | {"etp": 1 if self.etp is None else self.etp, "ep": self.ep, "edp": edp}

    @cached_property
    def dense(self) -> RankGenerator:
        """The numbering over tp, cp, dp and pp."""
        return _numbering(self.order, self.sizes, DENSE_NAME)

    @cached_property
    def expert(self) -> RankGenerator | None:
        """The numbering over etp, ep, edp and pp; None for a dense model."""
        return _numbering(self.order, self.sizes, EXPERT_NAME) if self.has_experts else None

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` along every axis, with those of the experts if there are any."""
        return self.dense.coordinates(rank) | ({} if self.expert is None else self.expert.coordinates(rank))

    def groups(self, axes: str) -> list[list[int]]:
        """All groups of an axis or of several axes of one numbering: "tp", "dp-cp", "etp-ep-pp"."""
        return self._numbering_of(axes).groups(axes)

    def group_of(self, rank: int, axes: str) -> list[int]:
        """The group of `rank` among `groups(axes)`."""
        return self._numbering_of(axes).group_of(rank, axes)

    def _numbering_of(self, axes: str) -> RankGenerator:
        found = next((one for one in (self.dense, self.expert) if one and {*axes.split("-")} <= {*one.strides}), None)
        assert found is not None, f"no groups of {axes} in {self}"
        return found


def _numbering(order: str, sizes: Mapping[str, int], names: Mapping[str, str]) -> RankGenerator:
    """The axes of `order` under their `names`; those it leaves out have size 1 and follow at the end."""
    complete = dict.fromkeys([*order.split("-"), *DEFAULT_ORDER.split("-")])
    return RankGenerator(tuple((names[axis], sizes[names[axis]]) for axis in complete if axis in names))


def pipeline_strides(order: str, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Distance in ranks between neighbouring stages: in the dense numbering, and in that of the experts.

    A pipeline is an arithmetic sequence of ranks, and in both numberings one starts at the first rank: the pipelines
    are the same where the strides are.
    """
    return _numbering(order, sizes, DENSE_NAME).strides["pp"], _numbering(order, sizes, EXPERT_NAME).strides["pp"]


def header_lines(layout: ParallelLayout) -> list[str]:
    """One to three lines about a layout of any size: the axes, those of the experts, and whom the first rank meets."""
    ranks = f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''}"
    split = {axis: size for axis, size in layout.sizes.items() if size > 1}
    chunks = f" (vpp {layout.vpp})" if layout.vpp > 1 else ""
    products = [
        " x ".join(f"{axis} {split[axis]}{chunks if axis == 'pp' else ''}" for axis in axes if axis in split)
        for axes in (DENSE_AXES, EXPERT_AXES)
    ]
    many = any(" x " in product for product in products)
    lines = [f"{ranks}: {products[0]}" if products[0] else ranks]
    if many:
        lines[0] += f", order {layout.order}"
    if layout.has_experts:
        lines.append(f"experts: {products[1] or ranks}")
    if many:
        groups = [(axis, layout.group_of(0, axis)) for axis in split]
        shown = (f"{axis} {' '.join(map(str, group[:3]))}{' ..' * (len(group) > 3)}" for axis, group in groups)
        lines.append(f"rank 0: {', '.join(shown)}")
    return lines

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
from typing import Any

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
EXPERT_NAME = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}  # the axis of the experts at the place of an axis


@dataclass(frozen=True)
class RankGenerator:
    """One numbering of a world: `sizes` holds (axis, size), fastest-varying first; the first rank is `rank_offset`."""

    sizes: tuple[tuple[str, int], ...]
    rank_offset: int = 0

    @property
    def world_size(self) -> int:
        return prod(size for _, size in self.sizes)

    @property
    def strides(self) -> dict[str, int]:
        """By axis, the distance in ranks between neighbours along it."""
        strides, stride = {}, 1
        for axis, size in self.sizes:
            strides[axis] = stride
            stride *= size
        return strides

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` along every axis."""
        rest = rank - self.rank_offset
        assert 0 <= rest < self.world_size, (rank, self)
        position = {}
        for axis, size in self.sizes:
            rest, position[axis] = divmod(rest, size)
        return position

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at a position; axes that are not named are at 0."""
        sizes, strides = dict(self.sizes), self.strides
        assert all(0 <= at < sizes[axis] for axis, at in coordinates.items()), (coordinates, self)
        return self.rank_offset + sum(at * strides[axis] for axis, at in coordinates.items())

    def groups(self, axes: str) -> list[list[int]]:
        """All groups of an axis, or of several ("tp-dp"): ranks that differ in nothing but their position along them.

        Members and groups alike are listed with the axis that is leftmost in the order varying fastest, however `axes`
        is written; so members ascend.
        """
        named = self._named(axes)
        members = self._offsets(named)
        others = self._offsets([axis for axis, _ in self.sizes if axis not in named])
        return [[self.rank_offset + base + member for member in members] for base in others]

    def group_of(self, rank: int, axes: str) -> list[int]:
        """The group of `rank` among `groups(axes)`, at the cost of its own size."""
        named, strides = self._named(axes), self.strides
        at = self.coordinates(rank)
        base = rank - sum(at[axis] * strides[axis] for axis in named)
        return [base + member for member in self._offsets(named)]

    def _named(self, axes: str) -> list[str]:
        named = axes.split("-")
        known = [axis for axis, _ in self.sizes]
        assert set(named) <= set(known), f"no axis {set(named) - set(known)} among {known}"
        return named

    def _offsets(self, axes: list[str]) -> list[int]:
        """Distances of all positions along `axes` from their origin, in the order of the numbering: ascending."""
        offsets, stride = [0], 1
        for axis, size in self.sizes:
            if axis in axes:
                offsets = [at * stride + offset for at in range(size) for offset in offsets]
            stride *= size
        return offsets


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of all axes over one world. `etp` is None for a dense model, which has no expert axes.

    Sizes that a user gave go through `config.parallel_rules.layout_of`, which refuses what cannot be laid out; here
    that is a mistake of ours.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = DEFAULT_ORDER
    rank_offset: int = 0

    def __post_init__(self) -> None:
        sizes = {axis: self._size(axis) for axis in (*DENSE_AXES, "vpp", "ep")} | {
            "etp": 1 if self.etp is None else self.etp
        }
        assert min(sizes.values()) >= 1, self
        assert self.ep == 1 or self.has_experts, f"ep needs etp, the tensor-parallel size of an expert: {self}"
        if self.has_experts:
            assert self.world_size % (sizes["etp"] * self.ep * self.pp) == 0, f"experts do not fill the world: {self}"
            dense, expert = pipeline_strides(self.order, sizes | {"edp": self.edp})
            assert self.pp == 1 or dense == expert, f"stages are {dense} ranks apart, those of experts {expert}: {self}"

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def has_experts(self) -> bool:
        return self.etp is not None

    @property
    def edp(self) -> int:
        """Replicas of each expert: what etp, ep and pp leave of the world. 1 for a dense model."""
        return 1 if self.etp is None else self.world_size // (self.etp * self.ep * self.pp)

    @cached_property
    def dense(self) -> RankGenerator:
        """The numbering over tp, cp, dp and pp."""
        axes = [axis for axis in complete_order(self.order) if axis in DENSE_AXES]
        return RankGenerator(tuple((axis, self._size(axis)) for axis in axes), self.rank_offset)

    @cached_property
    def expert(self) -> RankGenerator | None:
        """The numbering over etp, ep, edp and pp; None for a dense model."""
        if not self.has_experts:
            return None
        axes = [EXPERT_NAME[axis] for axis in complete_order(self.order) if axis in EXPERT_NAME]
        return RankGenerator(tuple((axis, self._size(axis)) for axis in axes), self.rank_offset)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` along every axis, with those of the experts if there are any."""
        expert = {} if self.expert is None else self.expert.coordinates(rank)
        return self.dense.coordinates(rank) | expert

    def generator(self, axes: str) -> RankGenerator:
        """The numbering that knows all of `axes`, either dense or expert."""
        dense = set(axes.split("-")) <= set(DENSE_AXES)
        found = self.dense if dense else self.expert
        assert found is not None, f"a dense model has no groups of {axes}"
        return found

    def groups(self, axes: str) -> list[list[int]]:
        """All groups of an axis or of several axes of one numbering: "tp", "dp-cp", "etp-ep-pp"."""
        return self.generator(axes).groups(axes)

    def group_of(self, rank: int, axes: str) -> list[int]:
        """The group of `rank` among `groups(axes)`."""
        return self.generator(axes).group_of(rank, axes)

    def _size(self, axis: str) -> int:
        size: Any = getattr(self, axis)
        return int(size)


def complete_order(order: str) -> list[str]:
    """The axes of `order`; those it leaves out have size 1 and follow at the end."""
    named = order.split("-")
    return named + [axis for axis in DEFAULT_ORDER.split("-") if axis not in named]


def pipeline_strides(order: str, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Distance in ranks between neighbouring stages: in the dense numbering, and in that of the experts.

    A pipeline is an arithmetic sequence of ranks, and in both numberings one starts at the first rank: the pipelines
    are the same where the strides are.
    """
    axes = complete_order(order)
    before = axes[: axes.index("pp")]
    dense = prod(sizes[axis] for axis in before if axis in DENSE_AXES)
    return dense, prod(sizes[EXPERT_NAME[axis]] for axis in before if axis in EXPERT_NAME)

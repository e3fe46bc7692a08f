"""Which rank computes what: sizes of the axes and the coordinates of a rank, as pure numbers.

Ranks are the mixed-radix numbers over `order`, leftmost axis fastest (Megatron-LM's convention): with the default order
`tp-cp-ep-dp-pp`, neighbouring ranks share a tensor-parallel group. No torch import.
"""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the dense axes over one world. `ep` is a unit axis here: it splits experts, never dense layers."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    order: str = "tp-cp-ep-dp-pp"

    @classmethod
    def over(cls, world_size: int, *, tp: int, cp: int, pp: int, order: str) -> "ParallelLayout":
        """The layout of `world_size` ranks; dp is what remains. Divisibility is a config rule, checked before."""
        assert world_size % (tp * cp * pp) == 0, (world_size, tp, cp, pp)
        return cls(tp=tp, cp=cp, dp=world_size // (tp * cp * pp), pp=pp, order=order)

    @property
    def axes(self) -> dict[str, int]:
        """Size of each axis, fastest-varying first."""
        sizes = {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}
        return {axis: sizes[axis] for axis in self.order.split("-")}

    @property
    def world_size(self) -> int:
        return prod(self.axes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` along every axis."""
        assert 0 <= rank < self.world_size, (rank, self.world_size)
        position = {}
        for axis, size in self.axes.items():
            rank, position[axis] = divmod(rank, size)
        return position

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of one axis: the ranks that differ in nothing but their position along it."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            key = tuple(at for name, at in self.coordinates(rank).items() if name != axis)
            members.setdefault(key, []).append(rank)
        return list(members.values())

"""The layout of some sizes of axes, as a command line would ask for it."""

from typing import Any

from megalite.config.rule import Case
from megalite.config.rules import checked_layout
from megalite.config.schema import Config
from megalite.config.settings import with_values
from megalite.layout.ranks import ParallelLayout


def laid_out(world_size: int, *, experts: bool = False, **axes: Any) -> ParallelLayout:
    values = {f"parallel.{axis}": size for axis, size in axes.items()}
    values["model.moe.num_experts"] = axes.get("ep", 1) if experts or not axes.keys().isdisjoint(("ep", "etp")) else 0
    return checked_layout(Case(with_values(Config(), values), world_size))

"""The layout of some sizes of axes, as a command line would ask for it."""

from typing import Any

from megalite.config.layout import layout_of
from megalite.config.rule import Case, problems_of
from megalite.config.rules import LAYOUT_RULES
from megalite.config.schema import Config
from megalite.config.settings import with_values
from megalite.errors.problems import refuse
from megalite.layout.ranks import ParallelLayout


def laid_out(world_size: int, *, experts: bool = False, **axes: Any) -> ParallelLayout:
    values = {f"parallel.{axis}": size for axis, size in axes.items()}
    values["model.moe.num_experts"] = axes.get("ep", 1) if experts or not axes.keys().isdisjoint(("ep", "etp")) else 0
    config = with_values(Config(), values)
    refuse(problems_of(Case(config, world_size), LAYOUT_RULES))
    return layout_of(config, world_size)

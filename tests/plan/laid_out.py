"""The layout of some sizes of axes, as a command line would ask for it."""

from typing import Any

from megalite.config.parallel_rules import checked_layout
from megalite.config.rule import Case
from megalite.config.schema import Config
from megalite.config.settings import with_values
from megalite.layout.ranks import ParallelLayout


def laid_out(world_size: int, *, experts: bool = False, **axes: Any) -> ParallelLayout:
    config = with_values(Config(), {f"parallel.{axis}": size for axis, size in axes.items()})
    return checked_layout(Case(config, world_size, experts))

"""What a config asks of the layout, as numbers. Whether the numbers fit together is for the rules to say."""

from math import lcm

from megalite.config.schema import Config
from megalite.config.settings import value_of
from megalite.layout.ranks import DEFAULT_ORDER, ParallelLayout
from megalite.layout.stages import StageSettings

AXES = tuple(DEFAULT_ORDER.split("-"))
STAGE_NAMES = {  # how a user knows the fields of `StageSettings`
    "num_layers": "model.num_layers",
    "first_layers": "parallel.first_stage_layers",
    "last_layers": "parallel.last_stage_layers",
    "layout": "parallel.pipeline_layout",
    **{name: f"parallel.{name}" for name in ("pp", "vpp", "standalone_embedding", "count_embedding", "count_loss")},
}


def layout_of(config: Config, world_size: int, *, experts: bool = False) -> ParallelLayout:
    """The layout that a config asks for which the rules have passed. `experts`: see `has_experts`."""
    axes, sizes = config.parallel, axis_sizes(config, world_size, experts=experts)
    etp = sizes["etp"] if has_experts(config, experts=experts) else None
    return ParallelLayout(axes.tp, axes.cp, sizes["dp"], axes.pp, axes.vpp, axes.ep, etp, axes.order)


def has_experts(config: Config, *, experts: bool = False) -> bool:
    """Whether it is the layout of a mixture of experts (of any model, with `experts`)."""
    axes = config.parallel
    return experts or config.model.moe.num_experts > 0 or axes.ep > 1 or axes.etp not in (None, axes.tp)


def axis_sizes(config: Config, world_size: int, *, experts: bool = False) -> dict[str, int]:
    """The size of every axis; dp and edp are rounded down where the layout does not fill the world."""
    axes, experts = config.parallel, has_experts(config, experts=experts)
    dp, edp = world_size // dense_ranks(config), world_size // expert_ranks(config) if experts else 1
    etp = (axes.etp or axes.tp) if experts else 1
    return {"tp": axes.tp, "cp": axes.cp, "dp": dp, "pp": axes.pp, "ep": axes.ep, "etp": etp, "edp": edp}


def dense_ranks(config: Config) -> int:
    """Ranks that hold one copy of the dense layers."""
    return config.parallel.tp * config.parallel.cp * config.parallel.pp


def expert_ranks(config: Config) -> int:
    """Ranks that hold one copy of the experts."""
    return (config.parallel.etp or config.parallel.tp) * config.parallel.ep * config.parallel.pp


def least_world(config: Config) -> int:
    """Ranks of the smallest world that the layout fills."""
    return lcm(dense_ranks(config), expert_ranks(config))


def stage_settings(config: Config, split_rank: int | None = None) -> StageSettings:
    """Who holds which layers, as the config says it."""
    fields = {field: value_of(config, name) for field, name in STAGE_NAMES.items()}
    return StageSettings(**fields, split_rank=split_rank)

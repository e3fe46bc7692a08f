"""The layout that a config asks for, in numbers that the rules judge, and the exchange of context-parallel ranks."""

from dataclasses import dataclass
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


def layout_of(config: Config, world_size: int) -> ParallelLayout:
    """The layout that a config asks for which the rules have passed."""
    axes, sizes = config.parallel, axis_sizes(config, world_size)
    etp = sizes["etp"] if config.model.moe.num_experts else None
    return ParallelLayout(axes.tp, axes.cp, sizes["dp"], axes.pp, axes.vpp, axes.ep, etp, axes.order)


def axis_sizes(config: Config, world_size: int) -> dict[str, int]:
    """The size of every axis; dp and edp are rounded down where the layout does not fill the world."""
    axes, sizes = config.parallel, {"dp": world_size // dense_ranks(config), "etp": 1, "edp": 1}
    if config.model.moe.num_experts:
        sizes |= {"etp": axes.etp or axes.tp, "edp": world_size // expert_ranks(config)}
    return {"tp": axes.tp, "cp": axes.cp, "pp": axes.pp, "ep": axes.ep, **sizes}


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


@dataclass(frozen=True)
class Exchange:
    """How cp = ring x alltoall ranks share a sequence. `gathers`: blocks are gathered, not passed round."""

    alltoall: int
    ring: int
    gathers: bool = False

    @property
    def name(self) -> str:
        between = "allgather" if self.gathers else "ring"
        if self.ring == 1:
            return "alltoall"
        return between if self.alltoall == 1 else f"alltoall of {self.alltoall} + {between} of {self.ring}"


def exchange_of(config: Config) -> Exchange:
    """What `parallel.cp_comm` says, or with `auto` what suits heads, dropout and documents, and sends least."""
    kind, cp, documents = config.parallel.cp_comm, config.parallel.cp, not config.data.cross_document_attention
    dropout = config.model.dropout if config.model.attention_dropout is None else config.model.attention_dropout
    if kind in ("ring", "allgather"):
        return Exchange(1, cp, kind == "allgather")
    sizes = [size for size in range(1, cp + 1) if cp % size == 0 and exchanges_heads(config, size)]
    if kind == "alltoall+ring":
        size = config.parallel.cp_alltoall or max((size for size in sizes if size < cp), default=1)
        return Exchange(size, max(1, cp // size))
    if kind == "alltoall" or dropout or (documents and cp in sizes):  # dropout needs whole rows
        return Exchange(cp, 1)
    if documents:  # only the keys of the same document are fetched
        return Exchange(1, cp, gathers=True)
    best = min(sizes, key=lambda size: sent_elements(config, size, cp // size))
    return Exchange(best, cp // best)


def sent_elements(config: Config, alltoall: int, ring: int) -> float:
    """Elements that a rank sends per token, layer and unit of head_size. Exchanging heads moves queries, keys, values
    and the output twice (forward and backward); a ring moves keys and values twice, and their gradients."""
    heads, groups = local_heads(config)
    swapped = (2 * heads + 2 * max(groups, alltoall)) * (alltoall - 1) / alltoall if alltoall > 1 else 0.0
    return 2 * swapped + 3 * 2 * max(groups, alltoall) * (ring - 1)


def local_heads(config: Config) -> tuple[int, int]:
    """Query heads and key-value heads of one tensor-parallel rank."""
    heads, tp = config.model.num_attention_heads, config.parallel.tp
    return max(1, heads // tp), max(1, (config.model.num_key_value_heads or heads) // tp)


def exchanges_heads(config: Config, ranks: int) -> bool:
    """Whether `ranks` ranks can divide the heads: by whole groups, or by groups that several ranks copy."""
    heads, groups = local_heads(config)
    return heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)

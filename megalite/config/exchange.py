"""Which exchange the context-parallel ranks of a sequence use: what the config says, or what sends least."""

from dataclasses import dataclass

from megalite.config.schema import Config


@dataclass(frozen=True)
class Exchange:
    """How cp = ring x alltoall ranks share a sequence, and why. `gathers`: blocks are gathered, not passed round."""

    alltoall: int
    ring: int
    gathers: bool = False
    why: str = "as set"

    @property
    def name(self) -> str:
        between = "allgather" if self.gathers else "ring"
        if self.ring == 1:
            return "alltoall"
        return between if self.alltoall == 1 else f"alltoall of {self.alltoall} + {between} of {self.ring}"


def exchange_of(config: Config) -> Exchange:
    """What `parallel.cp_comm` says, or with `auto` what suits heads, dropout and documents, and sends least."""
    kind, cp, documents = config.parallel.cp_comm, config.parallel.cp, not config.data.cross_document_attention
    if kind == "alltoall":
        return Exchange(cp, 1)
    if kind in ("ring", "allgather"):
        return Exchange(1, cp, kind == "allgather")
    sizes = [size for size in range(1, cp + 1) if cp % size == 0 and exchanges_heads(config, size)]
    if kind == "alltoall+ring":
        size = config.parallel.cp_alltoall or max((size for size in sizes if size < cp), default=1)
        return Exchange(size, max(1, cp // size))
    if drops_probabilities(config):
        return Exchange(cp, 1, why="dropout of attention's probabilities needs whole rows of them")
    if documents and cp in sizes:
        return Exchange(cp, 1, why="heads divide, and each rank computes whole documents")
    if documents:
        return Exchange(1, cp, gathers=True, why="of packed documents only the keys that are seen are fetched")
    best = min(sizes, key=lambda size: sent_elements(config, size, cp // size))
    return Exchange(best, cp // best, why="it sends least")


def sent_elements(config: Config, alltoall: int, ring: int) -> float:
    """Elements that a rank sends per token that it holds, layer and unit of head_size, forward and backward.

    The exchange of heads moves queries, keys, values and the output, twice; a ring keys and values, twice, and their
    gradients.
    """
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


def drops_probabilities(config: Config) -> bool:
    dropout = config.model.attention_dropout
    return bool(config.model.dropout if dropout is None else dropout)

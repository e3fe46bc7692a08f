"""Which exchange the context-parallel ranks of a sequence use: what the config says, or what sends least."""

from dataclasses import dataclass

from megalite.config.schema import Config


@dataclass(frozen=True)
class Exchange:
    """How cp = ring x alltoall ranks share a sequence, and why. `gathers`: blocks are gathered, not passed round."""

    alltoall: int
    ring: int
    gathers: bool
    why: str

    @property
    def name(self) -> str:
        between = "allgather" if self.gathers else "ring"
        if self.ring == 1:
            return "alltoall"
        return between if self.alltoall == 1 else f"alltoall of {self.alltoall} + {between} of {self.ring}"


def exchange_of(config: Config) -> Exchange:
    """What `parallel.cp_comm` says, or with `auto` what suits heads, dropout and documents, and sends least."""
    axes, cp = config.parallel, config.parallel.cp
    if axes.cp_comm == "alltoall":
        return Exchange(cp, 1, False, "as set")
    if axes.cp_comm == "alltoall+ring":
        return Exchange(size := axes.cp_alltoall or _most_heads(config), max(1, cp // size), False, "as set")
    if axes.cp_comm != "auto":
        return Exchange(1, cp, axes.cp_comm == "allgather", "as set")
    documents = not config.data.cross_document_attention
    if drops_probabilities(config):
        return Exchange(cp, 1, False, "dropout of attention's probabilities needs whole rows of them")
    if documents and exchanges_heads(config, cp):
        return Exchange(cp, 1, False, "heads divide, and each rank computes whole documents")
    if documents:
        return Exchange(1, cp, True, "of packed documents only the keys that are seen are fetched")
    sizes = [size for size in range(1, cp + 1) if cp % size == 0 and exchanges_heads(config, size)]
    best = min(sizes, key=lambda size: sent_elements(config, size, cp // size))
    return Exchange(best, cp // best, False, "it sends least")


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
    model, tp = config.model, config.parallel.tp
    return max(1, model.num_attention_heads // tp), max(
        1, (model.num_key_value_heads or model.num_attention_heads) // tp
    )


def exchanges_heads(config: Config, ranks: int) -> bool:
    """Whether `ranks` ranks can divide the heads: by whole groups, or by groups that several ranks copy."""
    heads, groups = local_heads(config)
    return heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)


def drops_probabilities(config: Config) -> bool:
    model = config.model
    return bool(model.dropout if model.attention_dropout is None else model.attention_dropout)


def _most_heads(config: Config) -> int:
    """The largest a < cp in cp = a x b that divides the heads; 1 where there is none."""
    cp = config.parallel.cp
    return max((a for a in range(1, cp) if cp % a == 0 and exchanges_heads(config, a)), default=1)

"""Context parallelism in the config: which exchange its ranks use, and the rules that it keeps."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megalite.config.remedies import Case, Flaw, Rule
from megalite.config.schema import Config
from megalite.errors.remedies import divisors, multiples

BLOCK = 16  # tokens: the shortest piece of a ring's sequence that fills the rows of a matrix unit
CP, COMM, SIZE, LENGTH = "parallel.cp", "parallel.cp_comm", "parallel.cp_alltoall", "train.seq_length"


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
    """Whether so many ranks can divide the heads: whole groups, or groups that several ranks have a copy of."""
    heads, groups = local_heads(config)
    return heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)


def drops_probabilities(config: Config) -> bool:
    model = config.model
    return bool(model.dropout if model.attention_dropout is None else model.attention_dropout)


def _most_heads(config: Config) -> int:
    """Of cp = a x b the largest a below cp that divides the heads; 1 where there is none."""
    cp = config.parallel.cp
    return max((a for a in range(1, cp) if cp % a == 0 and exchanges_heads(config, a)), default=1)


def sequences_divide(case: Case) -> Iterator[Flaw]:
    axes, length = case.config.parallel, case.config.train.seq_length
    if axes.cp == 1:
        return
    tp = axes.tp if axes.sequence_parallel is not False else 1
    unit = 2 * axes.cp * tp
    if length % unit:
        over = f" x {case.show('parallel.tp')}" if tp > 1 else ""
        rule = f"not a multiple of 2 x {case.show(CP)}{over} = {unit}, the pieces that a sequence is cut into"
        yield Flaw(LENGTH, rule, {LENGTH: multiples(unit, length), CP: divisors(case.world_size, axes.cp)})
        return
    ring = exchange_of(case.config).ring
    if ring > 1 and length < 2 * ring * BLOCK:
        rule = f"leaves {case.show(CP)} pieces of {length // (2 * ring)} tokens, shorter than a block of {BLOCK}"
        fixes: dict[str, Iterable[Any]] = {LENGTH: multiples(unit, 2 * ring * BLOCK), COMM: ["alltoall"]}
        yield Flaw(LENGTH, rule, fixes | {CP: divisors(case.world_size, axes.cp)})


def heads_suit_the_exchange(case: Case) -> Iterator[Flaw]:
    config, comm, size, cp = case.config, case.config.parallel.cp_comm, case.config.parallel.cp_alltoall, case.value(CP)
    if cp == 1:  # another rule says that they have no effect
        return
    heads, groups = local_heads(config)
    have = f"the {heads} query and {groups} key-value heads of a rank"
    others = {COMM: ["auto", "alltoall", "ring", "allgather"], CP: divisors(case.world_size, cp)}
    if comm != "alltoall+ring":
        if size is not None:
            yield Flaw(SIZE, f"has no effect with {case.show(COMM)}", {COMM: ["alltoall+ring"], SIZE: [None]})
        if comm == "alltoall" and not exchanges_heads(config, cp):
            yield Flaw(COMM, f"{have} do not divide over {case.show(CP)}", others)
    elif not (sizes := [a for a in range(2, cp) if cp % a == 0]):
        yield Flaw(COMM, f"{case.show(CP)} is no product of two sizes above 1", others)
    elif size is not None and size not in sizes:
        rule = f"must be a divisor of {case.show(CP)} between 1 and {cp}"
        yield Flaw(SIZE, rule, {SIZE: [None, *sizes], **others})
    elif not exchanges_heads(config, alltoall := exchange_of(config).alltoall) or alltoall == 1:
        rule = f"does not divide {have}" if size else f"no divisor of {case.show(CP)} between 1 and {cp} divides {have}"
        yield Flaw(SIZE if size else COMM, rule, {SIZE: [None], **others})


def dropout_suits_the_exchange(case: Case) -> Iterator[Flaw]:
    config, name, cp = case.config, "model.attention_dropout", case.value(CP)
    if cp == 1 or not drops_probabilities(config):
        return
    fixes: dict[str, Iterable[Any]] = {name: [0.0], COMM: ["alltoall"], CP: [1]}
    if exchange_of(config).ring > 1:
        yield Flaw(name, f"{case.show(COMM)} never has whole rows of probabilities to drop from", fixes)
    elif config.parallel.cp_comm == "auto" and not exchanges_heads(config, cp):
        heads, groups = local_heads(config)
        have = f"{heads} query and {groups} key-value heads of a rank"
        rule = f"needs an exchange of heads, and {have} do not divide over {case.show(CP)}"
        yield Flaw(name, rule, fixes)


CONTEXT_RULES: tuple[Rule, ...] = (sequences_divide, heads_suit_the_exchange, dropout_suits_the_exchange)

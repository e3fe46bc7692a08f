"""The rules of context parallelism."""

from collections.abc import Iterable, Iterator
from typing import Any

from megalite.config.exchange import drops_probabilities, exchange_of, exchanges_heads, local_heads
from megalite.config.remedies import Case, Flaw, Rule
from megalite.errors.remedies import divisors, multiples

BLOCK = 16  # tokens: the shortest piece of a ring's sequence that fills the rows of a matrix unit
CP, COMM, SIZE, LENGTH = "parallel.cp", "parallel.cp_comm", "parallel.cp_alltoall", "train.seq_length"


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

"""Brings each token to its experts and what they made of it back, over the ranks that hold one set of experts.

These ranks (etp x ep) each have tokens of their own and E / ep experts, cut etp ways. `alltoall` sends a row for each
choice, to every rank that holds a part of the expert; what comes back are terms of a sum. `allgather` sends all tokens
to all ranks, and sums what each makes of them: fewer messages, and more of it travels. A rank alone sends nothing. How
many rows a rank will receive it must know before it can receive them: one wait for the device per layer and pass.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.kernels.grouped import RowGroups
from megalite.launch.context import ParallelContext
from megalite.moe.router import Choice, count_choices
from megalite.moe.rows import Rows, inverse
from megalite.tensor_parallel.collectives import TensorGroup, finish, start_all_gather, start_all_to_all
from megalite.tensor_parallel.mappings import gather_for_terms, reduce_scatter_to_sequence_parallel

Beside = Callable[[], Tensor] | None
Waiting = Callable[[], AbstractContextManager[object]]
Compute = Callable[[Tensor, Tensor, RowGroups], Tensor]  # rows [m, h], weights [m], rows of each local expert -> [m, h]


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that hold one set of a layer's experts together; by default one alone.

    `ep_of`: which part of the experts each member of `group` holds. `etp` members hold the same part, each a piece.
    """

    group: TensorGroup | None = None
    ep: int = 1
    ep_index: int = 0
    etp: int = 1
    etp_index: int = 0
    ep_of: tuple[int, ...] = (0,)
    waiting: Waiting = nullcontext  # entered to wait for rows of other members

    @classmethod
    def of(cls, context: ParallelContext, waiting: Waiting = nullcontext) -> "ExpertRanks":
        layout, group = context.layout, TensorGroup.of(context.group("etp-ep"))
        if group is None:
            return cls()
        own, ep_of = layout.coordinates(context.rank), [layout.coordinates(one) for one in context.members("etp-ep")]
        ranks = tuple(at["ep"] for at in ep_of)
        return cls(group, layout.ep, own["ep"], layout.etp or 1, own["etp"], ranks, waiting)


def dispatch(
    x: Tensor, choice: Choice, experts: int, compute: Compute, ranks: ExpertRanks, how: str, beside: Beside = None
) -> Tensor:
    """The sum of what `compute` makes of each token for each of its `experts`: x [t, h] -> [t, h].

    With `beside`, plus what that returns ([t, h]): it is called while tokens are on their way, where that can be.
    """
    if ranks.group is not None and how == "alltoall":
        return _exchanged(x, choice, experts, compute, ranks, beside)
    y = _gathered(x, choice, experts, compute, ranks)
    return y if beside is None else y + beside()


def _by_expert(choice: Choice, experts: int) -> tuple[Tensor, Tensor]:
    """The order in which the flattened choices [t * k] are those of the first expert, of the second, and so on, the
    dropped ones last; and how many each has [E]."""
    flat = choice.experts.flatten()
    return flat.argsort(stable=True), count_choices(flat, experts)


def _gathered(x: Tensor, choice: Choice, experts: int, compute: Compute, ranks: ExpertRanks) -> Tensor:
    """The tokens of all ranks of the group go through the experts here. A rank alone leaves its rows of no expert at
    the end, where they are zeros or in no sum: nobody needs to know how many they are."""
    local, group = experts // ranks.ep, ranks.group
    if group is not None:
        with ranks.waiting():
            x, weights = gather_for_terms(x, group), gather_for_terms(choice.weights, group)
            chosen = finish(start_all_gather(choice.experts, group)) - ranks.ep_index * local
        choice = Choice(chosen.masked_fill((chosen < 0) | (chosen >= local), local), weights)
    order, counts = _by_expert(choice, local)
    if group is None:
        groups = RowGroups.of(counts)
    else:
        numbers = counts.tolist()  # waits for the device: else there would be ep times as many rows
        groups, order = RowGroups(counts, numbers), order[: sum(numbers)]
    used = groups.ends[-1:] if groups.on_host is None else None
    rows = Rows.of_choices(order, *choice.experts.shape, complete=group is None, used=used)
    taken = rows.take(x)
    del x  # makes room for what experts compute
    weights = choice.weights.flatten().gather(0, order)  # each once: no sort where gradients return
    terms = rows.sum(compute(taken, weights, groups))
    if group is None:
        return terms
    with ranks.waiting():
        return reduce_scatter_to_sequence_parallel(terms, group)


def _exchanged(x: Tensor, choice: Choice, experts: int, compute: Compute, ranks: ExpertRanks, beside: Beside) -> Tensor:
    local, members, group = experts // ranks.ep, len(ranks.ep_of), ranks.group
    assert group is not None
    order, counts = _by_expert(choice, experts)
    of_part = counts.view(ranks.ep, local).sum(1)
    with ranks.waiting():
        from_members = finish(start_all_gather(counts, group)).view(members, ranks.ep, local)[:, ranks.ep_index]
        numbers = torch.cat([from_members.flatten(), of_part]).tolist()  # the one wait for the device
    arriving, sizes = numbers[: members * local], numbers[members * local :]
    receives = [sum(arriving[member * local : (member + 1) * local]) for member in range(members)]

    # What is sent: for each member the rows of its experts.
    begins = [sum(sizes[:part]) for part in range(ranks.ep)]
    sends = [sizes[part] for part in ranks.ep_of]
    sent = torch.cat([order[begins[part] : begins[part] + sizes[part]] for part in ranks.ep_of])
    rows = Rows.of_choices(sent, *choice.experts.shape, complete=ranks.etp == 1 and len(sent) == len(order))

    # What arrives is sorted by member, then by expert; experts want their rows together.
    there = _Exchange(sends, receives, group, ranks.waiting)
    on_their_way = _Start.apply(there, rows.take(x), choice.weights.flatten()[sent])
    others = None if beside is None else beside()
    arrived, weights = _Finish.apply(there, *on_their_way)
    of_expert = torch.arange(local, device=order.device).repeat(members)
    of_expert = of_expert.repeat_interleave(from_members.flatten(), output_size=sum(receives))
    together = of_expert.argsort(stable=True)
    groups = RowGroups(from_members.sum(0), [sum(arriving[expert::local]) for expert in range(local)])
    own = Rows(together, inverse(together), None)
    taken = own.take(arrived)
    del arrived, on_their_way  # makes room for what experts compute
    back = _Exchange(receives, sends, group, ranks.waiting)
    (returned,) = _Finish.apply(back, *_Start.apply(back, own.sum(compute(taken, weights[together], groups))))
    y = rows.sum(returned)
    return y if others is None else y + others


@dataclass
class _Exchange:
    """Rows that travel to the members of `group`: how many to each, and how many from each."""

    sends: list[int]
    receives: list[int]
    group: TensorGroup
    waiting: Waiting
    gradients: tuple[Tensor, ...] = ()  # on their way back


class _Start(torch.autograd.Function):
    """Sends parts of each tensor to all members; theirs are there after `_Finish`. In backward it finishes what
    `_Finish` has started: both times, what was computed between the two runs beside the exchange. Tensors that travel
    together go through one call: all members must start their exchanges in one order, in backward too."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(start_all_to_all(one, exchange.sends, exchange.receives, exchange.group) for one in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        started, ctx.exchange.gradients = ctx.exchange.gradients, ()
        with ctx.exchange.waiting():
            return None, *(finish(one) for one in started)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *started: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        with exchange.waiting():
            return tuple(finish(one) for one in started)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that go on are of no use: those that travel have another shape."""
        exchange: _Exchange = ctx.exchange
        exchange.gradients = tuple(
            start_all_to_all(one, exchange.receives, exchange.sends, exchange.group) for one in grads
        )
        return None, *grads

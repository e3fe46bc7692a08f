"""Holds the schedules: each is one pure function from the shape of a pipeline to the actions of one rank.

In every schedule each chunk takes the microbatches in their order, forward and backward, so that gradients are summed
in one order and all schedules of several ranks give the same bits. (On one rank, tied embeddings get two gradients of
each microbatch: gpipe adds them in another order than 1f1b.) A new schedule is one function, one line of `SCHEDULES`
and a choice of the setting `parallel.schedule`.

gpipe: Huang et al. 2018 (arXiv 1811.06965). 1f1b, interleaved: Narayanan et al. 2021 (arXiv 2104.04473), warm-up counts
and orders as in Megatron-LM. zb-h1: Qi et al. 2023 (arXiv 2401.10241). No torch import.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from megalite.config.schedule_rules import ScheduleRequest, default_group_size, schedule_flaws
from megalite.layout.flaws import refuse
from megalite.pipeline.actions import Action, Schedule


@dataclass(frozen=True)
class Shape:
    """Sizes of a pipeline and its batch. `group_size`: microbatches that a rank takes through one chunk in a row before
    it goes on with the next chunk (interleaved alone)."""

    pp: int
    vpp: int
    microbatches: int
    group_size: int


Rows = Callable[[Shape, int], Iterator[Action]]  # shape, rank -> its actions
Bound = Callable[[Shape, int], int]  # shape, rank -> activations that it holds at most


def gpipe(shape: Shape, rank: int) -> Iterator[Action]:
    """All forward passes, then all backward passes: every activation is held at the turn."""
    yield from (Action("forward", 0, microbatch) for microbatch in range(shape.microbatches))
    yield from (Action("backward", 0, microbatch) for microbatch in range(shape.microbatches))


def one_forward_one_backward(shape: Shape, rank: int) -> Iterator[Action]:
    """As many forward passes as there are ranks behind this one, then forward and backward in turn."""
    forward = [Action("forward", 0, microbatch) for microbatch in range(shape.microbatches)]
    backward = [Action("backward", 0, microbatch) for microbatch in range(shape.microbatches)]
    return _in_turn(forward, backward, _warm_up(shape, rank))


def interleaved(shape: Shape, rank: int) -> Iterator[Action]:
    """1f1b over the chunks of the rank: a group of microbatches through one chunk, then through the next."""
    order = _chunk_order(shape)
    forward = [Action("forward", chunk, microbatch) for chunk, microbatch in order]
    backward = [Action("backward", shape.vpp - 1 - chunk, microbatch) for chunk, microbatch in order]
    return _in_turn(forward, backward, _interleaved_warm_up(shape, rank))


def zb_h1(shape: Shape, rank: int) -> Iterator[Action]:
    """1f1b whose backward pass is split: weight gradients, for which nobody waits, fill the bubble.

    Rank r puts them off by r microbatches. All ranks then hold as much as rank 0 of 1f1b at most: pp - r activations,
    and what r weight gradients need.
    """
    warm_up, put_off = _warm_up(shape, rank), 0
    yield from (Action("forward", 0, microbatch) for microbatch in range(warm_up))
    for microbatch in range(shape.microbatches):
        if warm_up + microbatch < shape.microbatches:
            yield Action("forward", 0, warm_up + microbatch)
        yield Action("backward-input", 0, microbatch)
        if microbatch >= rank:
            yield Action("backward-weight", 0, microbatch - rank)
            put_off = microbatch - rank + 1
    yield from (Action("backward-weight", 0, microbatch) for microbatch in range(put_off, shape.microbatches))


@dataclass(frozen=True)
class Recipe:
    """A schedule's actions and what its ranks hold at most; None: nothing is put off."""

    rows: Rows
    activations: Bound
    together: Bound | None = None  # with those whose weight gradients are put off


SCHEDULES: dict[str, Recipe] = {
    "1f1b": Recipe(one_forward_one_backward, lambda shape, rank: min(shape.pp - rank, shape.microbatches)),
    "interleaved": Recipe(
        interleaved, lambda shape, rank: min(_interleaved_warm_up(shape, rank) + 1, shape.microbatches * shape.vpp)
    ),
    "zb-h1": Recipe(
        zb_h1,
        lambda shape, rank: min(shape.pp - rank, shape.microbatches),
        together=lambda shape, rank: min(shape.pp, shape.microbatches),
    ),
    "gpipe": Recipe(gpipe, lambda shape, rank: shape.microbatches),
}


def build_schedule(request: ScheduleRequest) -> Schedule:
    """The schedule of a request. Raises ValueError with all of `schedule_flaws`."""
    refuse(schedule_flaws(request))
    group_size = request.group_size or default_group_size(request.pp, request.microbatches)
    return table(request.schedule, Shape(request.pp, request.vpp, request.microbatches, group_size))


def table(name: str, shape: Shape) -> Schedule:
    """The schedule called `name` for a shape that suits it, which `build_schedule` makes sure of."""
    recipe, ranks = SCHEDULES[name], range(shape.pp)
    together = recipe.together
    return Schedule(
        name,
        shape.vpp,
        shape.microbatches,
        ranks=tuple(tuple(recipe.rows(shape, rank)) for rank in ranks),
        most_in_flight=tuple(recipe.activations(shape, rank) for rank in ranks),
        most_together=None if together is None else tuple(together(shape, rank) for rank in ranks),
    )


def forward_only(pp: int, vpp: int, microbatches: int) -> Schedule:
    """What evaluation runs: forward passes alone, of any number of microbatches, pp at a time through each chunk."""
    order = _chunk_order(Shape(pp, vpp, microbatches, group_size=pp))
    actions = tuple(Action("forward", chunk, microbatch) for chunk, microbatch in order)
    return Schedule("forward-only", vpp, microbatches, (actions,) * pp, forward_only=True)


def _warm_up(shape: Shape, rank: int) -> int:
    """Forward passes before the first backward pass can follow a forward pass."""
    return min(shape.pp - rank - 1, shape.microbatches)


def _interleaved_warm_up(shape: Shape, rank: int) -> int:
    """The first microbatch comes back to the last chunk of rank r after (vpp-1) groups and 2 (pp-r-1) passes."""
    return min(2 * (shape.pp - rank - 1) + (shape.vpp - 1) * shape.group_size, shape.microbatches * shape.vpp)


def _chunk_order(shape: Shape) -> list[tuple[int, int]]:
    """(chunk, microbatch) of a rank's forward passes; the last group holds what is left."""
    groups = [
        range(first, min(first + shape.group_size, shape.microbatches))
        for first in range(0, shape.microbatches, shape.group_size)
    ]
    return [(chunk, microbatch) for group in groups for chunk in range(shape.vpp) for microbatch in group]


def _in_turn(forward: list[Action], backward: list[Action], warm_up: int) -> Iterator[Action]:
    """The warm-up, then forward and backward in turn, then the backward passes that are left."""
    yield from forward[:warm_up]
    yield from chain.from_iterable(zip(forward[warm_up:], backward, strict=False))
    yield from backward[len(forward) - warm_up :]

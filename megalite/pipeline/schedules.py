"""Holds the schedules: each is one pure function from the shape of a pipeline to the actions of one rank.

In every schedule each chunk takes the microbatches in their order, forward and backward, so that gradients are summed
in one order and all schedules of several ranks give the same bits. (On one rank, tied embeddings get two gradients of
each microbatch: gpipe adds them in another order than 1f1b.) A new schedule is one function, one line of `SCHEDULES`
and a choice of the setting `parallel.schedule`.

gpipe: Huang et al. 2018 (arXiv 1811.06965). 1f1b, interleaved: Narayanan et al. 2021 (arXiv 2104.04473), warm-up counts
and orders as in Megatron-LM. zb-h1: Qi et al. 2023 (arXiv 2401.10241). No torch import.
"""

from collections.abc import Callable

from megalite.config.schedule_request import ScheduleRequest
from megalite.pipeline.actions import Action, ActionKind, Schedule


def gpipe(shape: ScheduleRequest, rank: int) -> tuple[Action, ...]:
    """All forward passes, then all backward passes: every activation is held at the turn."""
    return warmup_steady_cooldown(shape, warmup=shape.microbatches)


def one_forward_one_backward(shape: ScheduleRequest, rank: int) -> tuple[Action, ...]:
    """A warm-up of one forward pass for each rank behind this one, then forward and backward in turn."""
    return warmup_steady_cooldown(shape, warmup=shape.pp - rank - 1)


def interleaved(shape: ScheduleRequest, rank: int) -> tuple[Action, ...]:
    """1f1b over the chunks of the rank: a group of microbatches through one chunk, then through the next.

    The first microbatch comes back to the last chunk of rank r after (vpp-1) groups and 2 (pp-r-1) passes.
    """
    return warmup_steady_cooldown(shape, warmup=2 * (shape.pp - rank - 1) + (shape.vpp - 1) * shape.group)


def zb_h1(shape: ScheduleRequest, rank: int) -> tuple[Action, ...]:
    """1f1b whose backward pass is split: weight gradients, for which nobody waits, fill the bubble.

    Rank r defers them by r microbatches, and holds pp - r activations and what r weight gradients need: no more than
    rank 0 of 1f1b.
    """
    return warmup_steady_cooldown(shape, warmup=shape.pp - rank - 1, deferral=rank)


def warmup_steady_cooldown(shape: ScheduleRequest, *, warmup: int, deferral: int | None = None) -> tuple[Action, ...]:
    """`warmup` forward passes, then forward and backward passes in turn, then the backward passes that are left.

    With `deferral` backward passes are split, and weight gradients come that many microbatches later.
    """
    passes = chunk_order(shape)
    count, warmup = len(passes), min(warmup, len(passes))
    actions = []
    for step in range(-warmup, count + (deferral or 0)):
        if step + warmup < count:
            actions.append(Action("forward", *passes[step + warmup]))
        if 0 <= step < count:
            chunk, microbatch = passes[step]
            kind: ActionKind = "backward" if deferral is None else "backward-input"
            actions.append(Action(kind, shape.vpp - 1 - chunk, microbatch))
        if deferral is not None and 0 <= step - deferral < count:
            chunk, microbatch = passes[step - deferral]
            actions.append(Action("backward-weight", shape.vpp - 1 - chunk, microbatch))
    return tuple(actions)


def chunk_order(shape: ScheduleRequest) -> list[tuple[int, int]]:
    """(chunk, microbatch) of a rank's forward passes, group by group; the last group holds what is left."""
    starts = range(0, shape.microbatches, shape.group)
    groups = [range(start, min(start + shape.group, shape.microbatches)) for start in starts]
    return [(chunk, microbatch) for group in groups for chunk in range(shape.vpp) for microbatch in group]


SCHEDULES: dict[str, Callable[[ScheduleRequest, int], tuple[Action, ...]]] = {
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "gpipe": gpipe,
}


def build_schedule(request: ScheduleRequest) -> Schedule:
    """The schedule of a request in which `config.rules.schedule_flaws` finds nothing."""
    ranks = tuple(SCHEDULES[request.schedule](request, rank) for rank in range(request.pp))
    return Schedule(request.schedule, request.vpp, request.microbatches, ranks)


def forward_only(pp: int, vpp: int, microbatches: int) -> Schedule:
    """The schedule of evaluation: forward passes of any number of microbatches, pp at a time through each chunk."""
    order = chunk_order(ScheduleRequest("forward-only", pp, microbatches, vpp, group_size=pp))
    actions = tuple(Action("forward", chunk, microbatch) for chunk, microbatch in order)
    return Schedule("forward-only", vpp, microbatches, (actions,) * pp)

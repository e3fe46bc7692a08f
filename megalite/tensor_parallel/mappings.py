"""Mappings between what the ranks of a tensor-parallel group hold, each with its adjoint as its gradient.

A tensor is *replicated* (every rank holds the same), or each rank has its *own* (a part, or a term of a sum). The
gradient of a replicated tensor is replicated and complete; that of an own one is the rank's own. In these terms:

    function                             forward                              backward
    reduce_from_tensor_parallel          own -> replicated   sum              identity
    gather_from_sequence_parallel        own -> replicated   gather dim 0     split dim 0
    reduce_scatter_to_sequence_parallel  own -> own          reduce-scatter   gather dim 0
    gather_for_terms                     own -> own          gather dim 0     reduce-scatter

Part i of what is split or gathered is rank i's; parts are equal. Without a group all of them return x itself. They pass
`torch.compile(fullgraph=True)` and wait for their result: who has something to compute meanwhile (linear.py) calls
`collectives.start_*` and `finish`. What follows `gather_from_sequence_parallel` must be the same on every rank: for
ranks that each compute a part, `linear` gathers a sequence itself. Sources: Shoeybi et al. 2019 (f and g), Korthikanti
et al. 2022 (over the sequence).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalite.tensor_parallel.collectives import (
    TensorGroup,
    finish,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)

Operation = Callable[[Tensor, TensorGroup], Tensor]


def reduce_from_tensor_parallel(x: Tensor, group: TensorGroup | None) -> Tensor:
    """The sum of the ranks' x."""
    return mapped(x, _sum, _same, group)


def gather_from_sequence_parallel(x: Tensor, group: TensorGroup | None) -> Tensor:
    """The whole sequence: [s/t, ...] -> [s, ...]."""
    return mapped(x, _gather, _split, group)


def reduce_scatter_to_sequence_parallel(x: Tensor, group: TensorGroup | None) -> Tensor:
    """This rank's part of the sequence of the sum of the ranks' x: [s, ...] -> [s/t, ...]."""
    return mapped(x, _reduce_scatter, _gather, group)


def gather_for_terms(x: Tensor, group: TensorGroup | None) -> Tensor:
    """Everybody's x, of which each rank makes a term of a sum of its own: [n, ...] -> [t * n, ...]."""
    return mapped(x, _gather, _reduce_scatter, group)


def mapped(x: Tensor, forward: Operation, backward: Operation, group: TensorGroup | None) -> Tensor:
    """The linear operation `forward`, whose gradient is its adjoint `backward`."""
    return x if group is None else _Mapping.apply(x, forward, backward, group)


class _Mapping(torch.autograd.Function):
    """A linear operation and its adjoint, whose adjoint in turn is the operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Operation, backward: Operation, group: TensorGroup) -> Tensor:
        ctx.operations, ctx.group = (forward, backward), group
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        forward, backward = ctx.operations
        return _Mapping.apply(gradient, backward, forward, ctx.group), None, None, None


def _same(x: Tensor, group: TensorGroup) -> Tensor:
    return x


def _sum(x: Tensor, group: TensorGroup) -> Tensor:
    return finish(start_all_reduce(x, group))


def _gather(x: Tensor, group: TensorGroup) -> Tensor:
    return finish(start_all_gather(x, group))


def _reduce_scatter(x: Tensor, group: TensorGroup) -> Tensor:
    assert x.shape[0] % group.size == 0, (x.shape, group)
    return finish(start_reduce_scatter(x, group))


def _split(x: Tensor, group: TensorGroup) -> Tensor:
    """A copy: a view would keep the whole x alive, and is refused to in-place operations."""
    assert x.shape[0] % group.size == 0, (x.shape, group)
    return x.chunk(group.size)[group.index].clone(memory_format=torch.contiguous_format)

"""Mistakes of Muon, in ranks that end with them: what the comparison with one process must catch."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.layout.parameters import ParameterRecord
from megalite.optim import muon as muon_module
from megalite.optim import rank_buffers as rank_buffers_module
from megalite.optim.matrix_stacks import Homes, Stack
from megalite.optim.muon import Muon


def shards_for_themselves(context: ParallelContext, config: Config) -> None:
    def at_home(self: Homes, parts: Iterable[Tensor], compute: Any) -> Iterator[Tensor]:
        index = context.coordinates["tp"]
        for stack, part in zip(self._stacks, parts, strict=True):
            yield compute(stack, part.unflatten(1, stack.shards[index].shape)).flatten(1)

    Homes.at_home = at_home  # type: ignore[method-assign]


def replicas_of_keys_entered_twice(context: ParallelContext, config: Config) -> None:
    """Each rank's key and value are rows of the matrix, whoever else has them."""
    right = Muon._orthogonalised

    def orthogonalised(self: Muon, stack: Stack, whole: Tensor) -> Tensor:
        if not stack.heads:
            return right(self, stack, whole)
        key, value, t = whole[:, :, -2:-1], whole[:, :, -1:], len(stack.shards)
        parts = whole[:, :, :-2], torch.cat([key] * t, 2), torch.cat([value] * t, 2)
        q, k, v = (self._scaled(part.flatten(1, 3)).view_as(part) for part in parts)
        return torch.cat([q, k[:, :, :1], v[:, :, :1]], 2)

    Muon._orthogonalised = orthogonalised  # type: ignore[method-assign]


def scale_of_the_shard(context: ParallelContext, config: Config) -> None:
    right = muon_module.SCALES["max_ratio"]
    muon_module.SCALES["max_ratio"] = lambda rows, columns, rms: right(rows // context.size("tp"), columns, rms)


def idle_experts_judged_by_shards(context: ParallelContext, config: Config) -> None:
    """Here the first rank's shard of each, whose gradient may be anything elsewhere."""
    Homes.any = lambda self, flags: flags & (context.coordinates["etp"] == 0)  # type: ignore[method-assign]


def fused_queries_keys_and_values(context: ParallelContext, config: Config) -> None:
    Muon._orthogonalised = lambda self, stack, whole: self._scaled(whole.flatten(1, -2)).view_as(whole)  # type: ignore[method-assign]


def fused_gate_and_up(context: ParallelContext, config: Config) -> None:
    right = rank_buffers_module.records_of

    def records_of(*args: Any) -> list[ParameterRecord]:
        return [replace(one, stacked=one.stacked and 0) for one in right(*args)]

    rank_buffers_module.records_of = records_of


def clipped_too_late(context: ParallelContext, config: Config) -> None:
    """Momentum takes gradients in as they are."""
    right = Muon._direction
    Muon._direction = lambda self, stack, divisor, moving: right(  # type: ignore[method-assign]
        self, stack, torch.ones_like(divisor), moving
    )

"""Mistakes of Muon, in ranks that end with them: what the comparison with one process must catch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.layout.parameters import ParameterRecord
from megalite.optim import muon as muon_module
from megalite.optim import rank_buffers as rank_buffers_module
from megalite.optim.muon import Block, Homes, Muon


def shards_for_themselves(context: ParallelContext, config: Config) -> None:
    def at_home(self: Homes, blocks: Sequence[Block], parts: Sequence[Tensor], compute: Any) -> list[Tensor]:
        shapes = [block.shards[self.index].shape for block in blocks]
        cut = [replace(block, shape=shape) for block, shape in zip(blocks, shapes, strict=True)]
        return [compute(block, part.view(block.shape)).flatten() for block, part in zip(cut, parts, strict=True)]

    Homes.at_home = at_home  # type: ignore[method-assign, assignment]


def replicas_of_keys_entered_twice(context: ParallelContext, config: Config) -> None:
    """Each rank's key and value are rows of the matrix, whoever else has them."""
    right = Muon._orthogonalised

    def orthogonalised(self: Muon, block: Block, whole: Tensor) -> Tensor:
        if not block.heads:
            return right(self, block, whole)
        key, value, t = whole[:, -2:-1], whole[:, -1:], len(block.shards)
        twice = torch.cat([whole[:, :-2], *[key] * t, *[value] * t], 1)
        scale, rms, table = muon_module.SCALES[self._settings.scale], self._settings.rms, self._table
        parts = [part.flatten(0, 2) for part in twice.split([whole.shape[1] - 2, t, t], 1)]
        found = [muon_module.orthogonalised(each, table) * scale(len(each), each.shape[1], rms) for each in parts]
        q, k, v = (part.unflatten(0, (len(whole), -1, whole.shape[2])) for part in found)
        return torch.cat([q, k[:, :1], v[:, :1]], 1)

    Muon._orthogonalised = orthogonalised  # type: ignore[method-assign]


def scale_of_the_shard(context: ParallelContext, config: Config) -> None:
    right = muon_module.SCALES["max_ratio"]
    muon_module.SCALES["max_ratio"] = lambda rows, columns, rms: right(rows // context.size("tp"), columns, rms)


def idle_experts_judged_by_shards(context: ParallelContext, config: Config) -> None:
    """Here the first rank's shard of each, whose gradient may be anything elsewhere."""
    Homes.any = lambda self, flags: flags & (self.index == 0)  # type: ignore[method-assign]


def fused_queries_keys_and_values(context: ParallelContext, config: Config) -> None:
    right = muon_module.blocks_of
    muon_module.blocks_of = lambda *args: (replace(block, heads=False) for block in right(*args))


def fused_gate_and_up(context: ParallelContext, config: Config) -> None:
    right = rank_buffers_module.records_of

    def records_of(*args: Any) -> list[ParameterRecord]:
        return [replace(one, stacked=one.stacked and 0) for one in right(*args)]

    rank_buffers_module.records_of = records_of


def clipped_too_late(context: ParallelContext, config: Config) -> None:
    """Momentum takes gradients in as they are."""
    right = Muon._direction
    Muon._direction = lambda self, block, divisor, moves: right(  # type: ignore[method-assign]
        self, block, torch.ones_like(divisor), moves
    )

"""How far a step moves the weights: sums of squares of its update and of the weights, by layer and group.

The update is the masters after the step minus the masters before it: decay, learning rate, clipping and QK-clip are in
it, and rounding into parameters is not. A copy of this rank's masters exists while they are updated, when no activation
does. Each logical element is counted once: by its owner in the first replica, on the first rank of those that hold it
alike, a tied embedding by the stage that embeds. Padding is not counted.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.schema import Config
from megalite.layout.buffer_layout import Kind, SliceRange, slice_ranges
from megalite.layout.parameters import ParameterRecord, ShardBox, is_counted
from megalite.optim.buffers import TrainingBuffers, ranges_of
from megalite.optim.gradients import norm_of
from megalite.optim.groups import group_names
from megalite.optim.rank_buffers import records_of_model
from megalite.optim.zero import ReplicaGroups, part_of

Cell = tuple[str, str]  # a layer (embedding, block_0, ..., final_norm, head) and a group: what both have in common


def elements_of(config: Config) -> dict[Cell, int]:
    """The logical elements of each cell of the whole model, in one order on all ranks."""
    found = Counter[Cell]()
    for record, cell in _cells(config):
        found[cell] += record.numel
    return found


def _cells(config: Config) -> list[tuple[ParameterRecord, Cell]]:
    records = records_of_model(config)
    groups = group_names(records, config)
    return [(one, (part_of(one.name).replace("blocks.", "block_"), groups[one.name])) for one in records]


def counted_ranges(
    buffers: TrainingBuffers, replicas: Mapping[Kind, ReplicaGroups], config: Config, *, embeds: bool
) -> dict[Cell, list[SliceRange]]:
    """What this rank counts of each cell in its slices."""
    cell_of = {record.name: cell for record, cell in _cells(config)}
    kinds = [bucket.kind for bucket in buffers.layout.buckets]
    owned = [each for each in buffers.owned if replicas[kinds[each.bucket]].replica == 0]

    def is_counted_in(cell: Cell, record: ParameterRecord, box: ShardBox) -> bool:
        return cell_of[record.name] == cell and is_counted(record, box, embedding=embeds)

    return {cell: slice_ranges(owned, partial(is_counted_in, cell)) for cell in elements_of(config)}


class UpdateSizes:
    """Measures updates of the masters of `buffers`, of which a rank may have none. `embeds`: this rank's stages embed
    tokens."""

    def __init__(
        self,
        buffers: TrainingBuffers,
        replicas: Mapping[Kind, ReplicaGroups],
        config: Config,
        *,
        embeds: bool,
        world: dist.ProcessGroup | None,
    ) -> None:
        self._masters, self._world = buffers.masters, world
        self._none = torch.zeros((), dtype=torch.float64, device=buffers.device)
        self._ranges = counted_ranges(buffers, replicas, config, embeds=embeds)

    def copies(self) -> list[Tensor]:
        """The masters before a step."""
        return [master.clone() for master in self._masters]

    @torch.no_grad()
    def squares(self, before: list[Tensor]) -> Tensor:
        """After a step, from copies, which are used up: sums of squares of the update and of the weights, of all ranks,
        [2, cells] fp64. Collective, one all-reduce."""
        if before:
            torch._foreach_sub_(before, self._masters)
        own = [[self._square(slices, cell) for cell in self._ranges] for slices in (before, self._masters)]
        summed = torch.stack([torch.stack(row) for row in own])
        if self._world is not None:
            dist.all_reduce(summed, group=self._world)
        return summed

    def _square(self, slices: list[Tensor], cell: Cell) -> Tensor:
        parts = ranges_of(slices, self._ranges[cell])
        return norm_of(parts).square() if parts else self._none


def sizes_of(squares: Tensor, elements: Mapping[Cell, int]) -> dict[str, dict[str, float]]:
    """For a line of metrics: RMS and norm of the update and RMS of the weights, by layer and by group."""
    found = dict[str, dict[str, float]]()
    for at, prefix in enumerate(("", "group_")):
        sums = dict[str, list[float]]()
        for (cell, count), *pair in zip(elements.items(), *squares.tolist(), strict=True):
            before = sums.get(cell[at], [0.0] * 3)
            sums[cell[at]] = [sum_ + value for sum_, value in zip(before, (count, *pair), strict=True)]
        found[f"{prefix}update_rms"] = {name: sqrt(update / count) for name, (count, update, _) in sums.items()}
        found[f"{prefix}update_norm"] = {name: sqrt(update) for name, (_, update, _) in sums.items()}
        found[f"{prefix}weight_rms"] = {name: sqrt(weight / count) for name, (count, _, weight) in sums.items()}
    return found

"""QK-clip (Kimi K2, arXiv 2507.20534): after a step, queries and keys whose logits were too large are made smaller.

A group of heads has one key and its queries. Forward notes the largest logit of each group (`raise_largest` in
kernels/attention.py). Where the largest of a step, over all microbatches and ranks, exceeds the threshold, the group's
rows of queries and of keys in `attention.qkv`, biases included, are multiplied by sqrt(threshold / largest) each. No
other row changes a bit, and a step that is skipped changes none.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf, prod

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.layout.buffer_layout import OwnedRange
from megalite.model.gpt import GPT
from megalite.optim.buffers import TrainingBuffers


class QkClip:
    """Clips masters of `buffers` by what the `chunks` of all ranks of `world` note. `threshold` None: never."""

    def __init__(
        self, buffers: TrainingBuffers, chunks: Sequence[GPT], threshold: float | None, world: dist.ProcessGroup | None
    ) -> None:
        self._threshold, self._world, config = threshold, world, chunks[0].config
        tables = torch.zeros(2, config.num_layers, config.num_key_value_heads, dtype=torch.float64)
        self._noted, self._largest = tables.to(buffers.device).unbind()  # here, and on all ranks
        self._rows = list[tuple[Tensor, Tensor]]()  # masters, and where in the flat table each row's logit is
        for chunk in chunks if threshold is not None else ():
            for layer in map(int, chunk.blocks):
                shard = buffers.places[f"blocks.{layer}.attention.qkv.weight"][0].shard
                first = shard.boxes[0].offsets[0]
                chunk.largest_logits[layer] = self._noted[layer, first : first + shard.shape[0]]
        for each in buffers.owned if threshold is not None else ():
            if ".attention.qkv." in each.slot.record.name:
                self._rows += rows_of(each, buffers.masters[each.bucket][each.in_slice.start : each.in_slice.stop])

    def start_step(self) -> None:
        """Forget the logits of the step before."""
        if self._threshold is not None:  # else it would cost a launch
            self._noted.fill_(-inf)

    @torch.no_grad()
    def step(self, skip: Tensor) -> Tensor:
        """After the optimizer's: clip, but not where `skip` (0-d). Returns the largest logit of each layer of the
        model, [layers] fp64, or without a threshold nothing, [0]."""
        if self._threshold is None:
            return self._largest[:0, 0]
        self._largest.copy_(self._noted)
        if self._world is not None:
            dist.all_reduce(self._largest, dist.ReduceOp.MAX, self._world)
        clipped = (self._largest > self._threshold) & ~skip
        factors = torch.where(clipped, self._threshold / self._largest, 1.0).sqrt().flatten()
        factors = torch.cat([factors, torch.ones_like(factors[:1])])
        for rows, places in self._rows:
            rows.mul_(factors[places].to(rows.dtype).unsqueeze(1))
        return self._largest.amax(1)


def rows_of(owned: OwnedRange, master: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The elements of a range of queries, keys and values as rows with one factor each, [rows, elements]: whole heads,
    and what borders cut off before and behind them. With the place of each row's group among the logits of all layers,
    -1 where the row is a value's."""
    record, box, range_ = owned.slot.record, owned.box, owned.in_box
    assert isinstance(record.place, int)
    places = record.place * record.shape[0] + torch.arange(record.shape[0]).unsqueeze(1).repeat(1, record.shape[1])
    places[:, -1] = -1
    places = places[box.logical[:2]].flatten()
    size = prod(box.sizes[2:])  # of a head
    first, last = -(-range_.start // size) * size, range_.stop // size * size
    cuts = {range_.start, min(first, range_.stop), max(last, range_.start), range_.stop}
    for start, stop in pairwise(sorted(cuts)):
        of_rows = places[start // size : -(-stop // size)].to(master.device)
        yield master[start - range_.start : stop - range_.start].view(len(of_rows), -1), of_rows

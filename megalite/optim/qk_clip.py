"""QK-clip (Kimi K2, arXiv 2507.20534): after a step, queries and keys whose logits were too large are made smaller.

A group of heads has one key and its queries. Forward notes the largest logit of each group (`raise_largest` in
kernels/attention.py). Where the largest of a step, over all microbatches and ranks, exceeds the threshold, the group's
rows of queries and of keys in `attention.qkv`, biases included, are multiplied by sqrt(threshold / largest) each. No
other row changes a bit, and a step that is skipped changes none.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.layout.buffer_layout import OwnedRange
from megalite.model.gpt import GPT
from megalite.optim.buffers import TrainingBuffers

NOTHING = float("-inf")


class QkClip:
    """Clips masters of `buffers` by what the `chunks` of all ranks of `world` have noted. `threshold` None: never."""

    def __init__(
        self, buffers: TrainingBuffers, chunks: Sequence[GPT], threshold: float | None, world: dist.ProcessGroup | None
    ) -> None:
        self._threshold, self._world, config = threshold, world, chunks[0].config
        self._none = torch.zeros(0, dtype=torch.float64, device=buffers.device)
        # By layer and group of the model; behind them one number that stays as it is, for values.
        self._largest = self._none.new_zeros(config.num_layers, config.num_key_value_heads)
        self._noted = list[tuple[Tensor, Tensor]]()  # what a layer here has noted, and its part of the table
        self._rows = list[tuple[Tensor, Tensor]]()  # masters [rows, elements], and where in the table each row looks
        for chunk in chunks if threshold is not None else ():
            assert chunk.largest_logits is not None
            for layer, noted in zip(map(int, chunk.blocks), chunk.largest_logits, strict=True):
                slot, _ = buffers.places[f"blocks.{layer}.attention.qkv.weight"]
                first = slot.shard.boxes[0].offsets[0]
                self._noted.append((noted, self._largest[layer, first : first + len(noted)]))
        for each in buffers.owned if self._noted else ():
            if ".attention.qkv." in each.slot.record.name:
                whole = buffers.masters[each.bucket]
                master = whole[each.in_slice.start : each.in_slice.stop]
                self._rows += [
                    (part, torch.tensor(at, device=buffers.device)) for part, at in self._rows_of(each, master)
                ]

    def start_step(self) -> None:
        """Forget the logits of the step before."""
        for noted, _ in self._noted:
            noted.fill_(NOTHING)

    @torch.no_grad()
    def step(self, skip: Tensor) -> Tensor:
        """After the optimizer's: clip, but not where `skip` (0-d). Returns the largest logit of each layer of the
        model, [layers] fp64, or nothing."""
        if self._threshold is None:
            return self._none
        self._largest.fill_(NOTHING)
        for noted, place in self._noted:
            place.copy_(noted)
        if self._world is not None:
            dist.all_reduce(self._largest, dist.ReduceOp.MAX, self._world)
        above = (self._largest > self._threshold) & ~skip
        factors = torch.where(above, self._threshold / self._largest, 1.0).sqrt().flatten()
        factors = torch.cat([factors, torch.ones_like(factors[:1])])
        for rows, at in self._rows:
            rows.mul_(factors[at].to(rows.dtype).unsqueeze(1))
        return self._largest.amax(1)

    @staticmethod
    def _rows_of(owned: OwnedRange, master: Tensor) -> Iterator[tuple[Tensor, list[int]]]:
        """The elements of a range as rows with one factor each, [rows, elements]: whole heads, and what borders cut off
        before and behind these."""
        record, box, bounds = owned.slot.record, owned.box, owned.in_box
        assert isinstance(record.place, int)
        size = prod(box.sizes[2:])  # of a head
        first, last = -(-bounds.start // size) * size, bounds.stop // size * size
        cuts = sorted({bounds.start, min(first, bounds.stop), max(last, bounds.start), bounds.stop})
        for start, stop in pairwise(cuts):
            heads = range(start // size, -(-stop // size))
            groups = (divmod(head, box.sizes[1]) for head in heads)
            at = [
                record.place * record.shape[0] + box.offsets[0] + group
                if box.offsets[1] + head < record.shape[1] - 1
                else -1
                for group, head in groups
            ]
            yield master[start - bounds.start : stop - bounds.start].view(len(heads), -1), at

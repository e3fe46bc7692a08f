"""How the blocks of a ring see each other's keys and values, and how their gradients come home.

    exchange    forward                          backward                                   blocks in memory
    ring        R - 1 times a block to the next  the same, and R - 1 times a gradient        2
    allgather   everybody's block                the same, and a reduce-scatter              R
    documents   the rows that somebody sees      the same, and their gradients back          what is seen

Forward keeps none of what arrived: backward fetches it again, so that activations stay 1/R. In the ring a block is
computed with while the next one travels. Gradients travel in the dtype of the activations.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.layout.sequence import AttentionPlan
from megalite.tensor_parallel.collectives import (
    TensorGroup,
    finish,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from megalite.tensor_parallel.mappings import mapped

Waiting = Callable[[], AbstractContextManager[object]]
Block = tuple[int, Tensor]  # whose, and the rows of it that travel: [m, ...]
GradientOf = Callable[[int, Tensor], Tensor]  # of a block, in the dtype of statistics


@dataclass(frozen=True)
class CpGroups:
    """The ranks that share each sequence: those of `alltoall` swap heads for their parts of a block, those of `ring`
    see each other's blocks, by passing them on or, with `gathers`, all at once. `sharing`: all ranks that hold a part
    of a sequence, those of sequence parallelism included, for routers. `waiting` is entered to wait."""

    alltoall: TensorGroup | None = None
    ring: TensorGroup | None = None
    gathers: bool = False
    sharing: TensorGroup | None = None
    waiting: Waiting = nullcontext

    def swap(self, x: Tensor) -> Tensor:
        """Part i of x goes to rank i of `alltoall`, and part i of the result comes from it: its own adjoint."""

        def exchange(x: Tensor, group: TensorGroup) -> Tensor:
            rows = [len(x) // group.size] * group.size
            return self._arrived(start_all_to_all(x, rows, rows, group))

        return mapped(x, exchange, exchange, self.alltoall)

    def blocks(self, own: Tensor, plan: AttentionPlan) -> Iterator[Block]:
        """Every block, the own one [m, ...] first: the others are on their way while it is computed with."""
        ring = self._ring
        if self.gathers:
            coming, rows = self._start_gather(own, plan)
            yield ring.index, own
            blocks = enumerate(self._arrived(coming).split(rows))
            yield from ((source, block) for source, block in blocks if source != ring.index and len(block))
            return
        coming = self._pass_on(own)
        yield ring.index, own
        for step in range(1, ring.size):
            block = self._arrived(coming)
            if step < ring.size - 1:
                coming = self._pass_on(block)
            yield (ring.index - step) % ring.size, block

    def gradient(self, own: Tensor, plan: AttentionPlan, gradient_of: GradientOf) -> Tensor:
        """The gradient of the own block, summed over all ranks: each tells by `gradient_of` its part of a block's."""
        if self.gathers:
            return self._gathered_gradient(own, plan, gradient_of)
        ring, home, travelling = self._ring, torch.empty(0), None
        for source, block in self.blocks(own, plan):
            part = gradient_of(source, block)
            del block
            if source == ring.index:
                home = part
                continue
            if travelling is not None:  # the sum of the ranks that had this block before
                part += self._arrived(travelling)
            travelling = self._pass_on(part.to(own.dtype))
        assert travelling is not None
        return (home + self._arrived(travelling)).to(own.dtype)

    def _gathered_gradient(self, own: Tensor, plan: AttentionPlan, gradient_of: GradientOf) -> Tensor:
        ring = self._ring
        parts: dict[int, Tensor] = {source: gradient_of(source, block) for source, block in self.blocks(own, plan)}
        if not plan.partial:
            whole = torch.cat([parts[source].to(own.dtype) for source in range(ring.size)])
            return self._arrived(start_reduce_scatter(whole, ring))
        home = parts.pop(ring.index)
        sends, receives = self._counts(plan.fetched), self._counts(plan.sent)
        sent = torch.cat([home[:0].to(own.dtype), *(parts[source].to(own.dtype) for source in sorted(parts))])
        arrived = self._arrived(start_all_to_all(sent, sends, receives, ring)).split(receives)
        for (first, _), part in zip(plan.sent, arrived, strict=True):
            home[first : first + len(part)] += part
        return home.to(own.dtype)

    def _start_gather(self, own: Tensor, plan: AttentionPlan) -> tuple[Tensor, list[int]]:
        """What is on its way, one block after the other, and how many rows of each: all, or those that are needed here
        (of the own block, none)."""
        if not plan.partial:
            return start_all_gather(own, self._ring), [len(own)] * self._ring.size
        sends, receives = self._counts(plan.sent), self._counts(plan.fetched)
        sent = torch.cat([own[first : first + count] for (first, _), count in zip(plan.sent, sends, strict=True)])
        return start_all_to_all(sent, sends, receives, self._ring), receives

    def _pass_on(self, block: Tensor) -> Tensor:
        """To the next rank; what comes from the one before is there once it is waited for."""
        ring, rows = self._ring, len(block)
        sends, receives = [0] * ring.size, [0] * ring.size
        sends[(ring.index + 1) % ring.size] = receives[ring.index - 1] = rows
        return start_all_to_all(block, sends, receives, ring)

    def _arrived(self, coming: Tensor) -> Tensor:
        with self.waiting():
            return finish(coming)

    @property
    def _ring(self) -> TensorGroup:
        assert self.ring is not None
        return self.ring

    def _counts(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """Rows that travel to or from each rank of the ring, none of the own block."""
        return [0 if at == self._ring.index else stop - start for at, (start, stop) in enumerate(ranges)]

"""The routers of a rank's part of the model, as training meets them once a step: their metrics and their state."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalite.model.gpt import GPT
from megalite.moe.balance import AFTER_COUNTS, counts_of, update_router
from megalite.moe.router import Router


class Routers:
    """The routers of all `chunks` on this rank; a dense model has none."""

    def __init__(self, chunks: Sequence[GPT]) -> None:
        self._chunks = chunks
        self._layers = chunks[0].config.expert_layers  # of the whole model
        self._width = chunks[0].config.moe.num_experts * 2 + AFTER_COUNTS
        self._device = chunks[0].device

    def start_step(self) -> None:
        """Forget the counts of the step before."""
        for chunk in self._chunks:
            chunk.router_metrics.zero_()

    def figures(self) -> Tensor:
        """What this rank counted in the step, [layers of the model with experts, 2 E + 5] fp64 (balance.py): 0 where a
        layer is elsewhere, so that the sum over all ranks is the whole model's."""
        table = torch.zeros(len(self._layers), self._width, dtype=torch.float64, device=self._device)
        for chunk in self._chunks:
            for layer, row in zip(chunk.routers, chunk.router_metrics, strict=True):
                table[self._layers.index(layer)] = row
        return table

    def update(self, table: Tensor, skip: Tensor) -> None:
        """After a step, with the sum over all ranks; nothing changes where `skip` (0-d) is 1."""
        counts, balanced = counts_of(table)
        for name, router in self._named():
            at = self._layers.index(name)
            update_router(router, counts[at], balanced[at], skip)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """What steps change beside the parameters, by name: the same on all ranks that hold the layer."""
        for layer, router in self._named():
            yield f"blocks.{layer}.moe.router.expert_bias", router.expert_bias
            yield f"blocks.{layer}.moe.router.share", router.share

    def _named(self) -> Iterator[tuple[int, Router]]:
        for chunk in self._chunks:
            yield from chunk.routers.items()

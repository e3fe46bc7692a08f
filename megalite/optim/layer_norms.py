"""Root mean squares by layer: of what each part of the model computes, and of its gradient before clipping. They are
those of the whole batch and the whole model, on every layout.

Each rank adds the squares of what it alone has: its tokens (ranks of tp without sequence parallelism compute the same,
so the first counts), and those elements of its gradient slices that it counts for the norm. Only steps that are
multiples of log.layer_norms_interval pay: they read each part's output and the gradients once more.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.schema import Config
from megalite.layout.buffer_layout import Kind, SliceRange
from megalite.model.gpt import GPT, unseen
from megalite.optim.buffers import TrainingBuffers, ranges_of
from megalite.optim.gradients import norm_of
from megalite.optim.update_sizes import counted_ranges, elements_of
from megalite.optim.zero import ReplicaGroups


def layers_of(config: Config) -> Counter[str]:
    """The logical elements of each layer, from the embedding to the head."""
    found = Counter[str]()
    for (layer, _), count in elements_of(config).items():
        found[layer] += count
    return found


class LayerNorms:
    """Measures steps on one rank. `counts`: no other rank has its outputs. `embeds`: its stages embed tokens."""

    def __init__(
        self,
        chunks: Sequence[GPT],
        buffers: TrainingBuffers,
        replicas: Mapping[Kind, ReplicaGroups],
        config: Config,
        *,
        counts: bool,
        embeds: bool,
        world: dist.ProcessGroup | None,
    ) -> None:
        self._chunks, self._gradients, self._counts, self._world = chunks, buffers.gradients, counts, world
        self._ranges = {layer: list[SliceRange]() for layer in layers_of(config)}
        for (layer, _), ranges in counted_ranges(buffers, replicas, config, embeds=embeds).items():
            self._ranges[layer] += ranges
        self._layers = [*self._ranges]
        self._squares = torch.zeros(2, len(self._layers), dtype=torch.float64, device=buffers.device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile a step is taken."""
        self._squares.zero_()
        for chunk in self._chunks:
            chunk.after_part = self._add_output
        try:
            yield
        finally:
            for chunk in self._chunks:
                chunk.after_part = unseen

    @torch.no_grad()
    def _add_output(self, part: str, x: Tensor) -> None:
        layer = part.replace("blocks.", "block_")
        if self._counts and layer in self._ranges:
            self._squares[0, self._layers.index(layer)] += norm_of([x.detach().flatten()]).square()

    @torch.no_grad()
    def squares(self) -> Tensor:
        """Once gradients are summed and before they are used: squares of outputs and of gradients of all ranks,
        [2, layers] fp64. Collective, one all-reduce."""
        for at, ranges in enumerate(self._ranges.values()):
            if ranges:
                self._squares[1, at] = norm_of(ranges_of(self._gradients, ranges)).square()
        if self._world is not None:
            dist.all_reduce(self._squares, group=self._world)
        return self._squares


def norms_of(squares: Tensor, config: Config, tokens: int, loss_scale: float) -> dict[str, dict[str, float]]:
    """For a line of metrics. The head has no output here: its logits exist a piece at a time."""
    outputs, gradients = squares.tolist()
    layers, numbers = layers_of(config), tokens * config.model.hidden_size
    by_output = {
        layer: sqrt(square / numbers) for layer, square in zip(layers, outputs, strict=True) if layer != "head"
    }
    by_gradient = zip(layers.items(), gradients, strict=True)
    return {
        "activation_rms": by_output,
        "gradient_rms": {layer: sqrt(square / count) / loss_scale for (layer, count), square in by_gradient},
    }

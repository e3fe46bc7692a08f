"""Sums gradients over the ranks that hold the same parameters, bucket by bucket, while backward still runs.

A bucket starts to travel the moment its last gradient of the last microbatch is ready and all buckets before it have
started: ranks of a group must start them in one order, also where a parameter is not used on one of them. What was not
started during backward starts at its end. Inside an instance the sum is scattered: each rank receives its slice.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from megalite.layout.buffer_layout import Kind
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.collectives import Pending, start_all_reduce, start_reduce_scatter
from megalite.optim.sharing import Sharing
from megalite.tensor_parallel.deferred import Later


class GradientSync:
    """Turns the gradient buckets of all ranks into sums, of which each rank has its slices (`buffers.gradients`).

    `chunks` are the parts of the model that the rank holds; each has a last backward pass of its own in a step.
    `comm_dtype` is the dtype that travels. Without `overlap` everything happens in `finish`, to the same bits.
    """

    def __init__(
        self,
        buffers: TrainingBuffers,
        chunks: Sequence[nn.Module],
        sharing: Mapping[Kind, Sharing],
        *,
        comm_dtype: torch.dtype,
        overlap: bool = True,
    ) -> None:
        self._buffers = buffers
        self._sharing = [sharing[bucket.buffer.kind] for bucket in buffers.layout.buckets]
        self._comm_dtype = comm_dtype
        self._watched = [0] * len(self._sharing)  # by bucket: gradients that the last backward passes bring
        self._last: dict[int, Later] = {}  # chunks whose last gradients are coming
        self._started: list[Pending | None] = []
        self._nodes: list[Node] = []  # hooks live as long as these
        for chunk, part in enumerate(chunks):
            for name, parameter in part.named_parameters():
                number = buffers.places[name][1]
                travels = self._sharing[number].shard_group or self._sharing[number].replicate_group
                if overlap and travels is not None:
                    self._watch(parameter, chunk, number)
        self._missing = [*self._watched]  # of those, the ones that have not come yet

    def _watch(self, parameter: nn.Parameter, chunk: int, number: int) -> None:
        """Learn when the parameter's gradient is complete: its node runs after all its uses, also if a layer has put
        the gradient into the buffer itself and autograd sees none."""
        node = get_gradient_edge(parameter).node
        ready = partial(self._ready, number)
        node.register_hook(lambda *_: self._last[chunk](ready) if chunk in self._last else None)
        self._nodes.append(node)
        self._watched[number] += 1

    def expect_last(self, chunk: int, later: Later) -> None:
        """The chunk's next backward brings the last gradients of the step. What the arrival of one starts is given to
        `later`: it must wait for the work that this backward has put off so far."""
        self._last[chunk] = later

    def _ready(self, number: int) -> None:
        self._missing[number] -= 1
        while len(self._started) < len(self._missing) and self._missing[len(self._started)] == 0:
            self._start_next()

    def _start_next(self) -> None:
        number = len(self._started)
        sharing, bucket = self._sharing[number], self._buffers.gradient_buckets[number]
        pending = None
        if sharing.shard_group is not None:
            pending = start_reduce_scatter(bucket, sharing.shard_group, comm_dtype=self._comm_dtype)
        elif sharing.replicate_group is not None:
            pending = start_all_reduce(bucket, sharing.replicate_group, comm_dtype=self._comm_dtype)
        self._started.append(pending)

    def finish(self) -> None:
        """Return when `buffers.gradients` hold the sums over all ranks that hold the same parameters."""
        while len(self._started) < len(self._sharing):
            self._start_next()
        replicated: list[Pending] = []
        for number, pending in enumerate(self._started):
            if pending is not None:
                pending.wait()
            sharing = self._sharing[number]
            if sharing.shard_group is not None and sharing.replicate_group is not None:
                shard, group = self._buffers.gradients[number], sharing.replicate_group
                replicated.append(start_all_reduce(shard, group, comm_dtype=self._comm_dtype))
        for pending in replicated:
            pending.wait()
        self._missing, self._started = [*self._watched], []
        self._last.clear()

"""ZeRO-1: ranks that hold the same parameters share the optimizer's state (Rajbhandari et al. 2019, arXiv 1910.02054).

Ranks with the same parameters (dp x cp, for experts edp) form replicas of the optimizer. Within a replica each rank
owns an equal slice of every bucket (layout/buffer_layout.py); a bucket travels in three phases of a step:

1. Reduce, during backward: once the last gradient of a bucket is there, a reduce-scatter over `shard_group` gives each
   rank the sum of its slice. At the end, several replicas (hybrid sharding) add up their slices: an all-reduce over
   `replicate_group`. Unsharded (zero=0), the whole bucket is all-reduced over `replicate_group` during backward.
2. Update: each rank updates the masters of its slices and rounds them into its slices of the parameters (optimizer.py).
3. Gather, during the next forward: an all-gather over `shard_group` makes the parameters whole, in the order in which
   forward uses them. A part of the model waits for its buckets right before it is used.

           last backward                     step                      next forward
    ready 0 | ready 1 | ready 2      update own slices      wait N | block 0 | wait N-1 | block 1
    scatter 0 > scatter 1 > scatter 2 > replicas > clip > round > gather N > gather N-1 > ...

Ranks of a group must start transfers in one order, also where a parameter is not used on one of them: a bucket waits
for all buckets before it, and what backward did not start is started at its end.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import Kind
from megalite.optim.bucket_collectives import Pending, bucket_all_gather, bucket_all_reduce, bucket_reduce_scatter
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.rank_buffers import kinds_of, replica_groups
from megalite.tensor_parallel.deferred import Later


@dataclass(frozen=True)
class ReplicaGroups:
    """One rank's groups for one kind of parameters. A group of one rank is None.

    `shard_group`: the ranks of its replica, each of which owns a slice (rank_buffers.py says which).
    `replicate_group`: the ranks that own the same slice in other replicas; `replica` is the rank's place there.
    """

    shard_group: dist.ProcessGroup | None = None
    replicate_group: dist.ProcessGroup | None = None
    replica: int = 0

    @classmethod
    def of_rank(cls, context: ParallelContext, *, zero: bool, instances: int = 1) -> dict[Kind, "ReplicaGroups"]:
        """The groups by kind of parameters."""
        groups: dict[Kind, ReplicaGroups] = {"dense": cls(), "expert": cls()}
        for kind in kinds_of(context.layout):
            shard, same = replica_groups(kind, zero=zero, instances=instances)
            shard_group, replicate_group = (context.group(name) if name else None for name in (shard, same))
            groups[kind] = cls(shard_group, replicate_group, context.index(same) if same else 0)
        return groups


class GradientSync:
    """Phase 1: turns the gradient buckets of all ranks into sums, of which each rank has its slices.

    `chunks` are the rank's parts of the model; each has a last backward pass of its own in a step. `comm_dtype` is the
    dtype that travels. Without `overlap` everything happens in `finish`, to the same bits.
    """

    def __init__(
        self,
        buffers: TrainingBuffers,
        chunks: Sequence[nn.Module],
        replicas: Mapping[Kind, ReplicaGroups],
        *,
        comm_dtype: torch.dtype,
        overlap: bool = True,
    ) -> None:
        self._buffers, self._comm_dtype = buffers, comm_dtype
        self._groups = [replicas[bucket.buffer.kind] for bucket in buffers.layout.buckets]
        self._watched = [0] * len(self._groups)  # by bucket: gradients that the last backward passes bring
        self._last: dict[int, Later] = {}  # chunks whose last gradients are coming
        self._started: list[Pending | None] = []
        self._nodes: list[Node] = []  # hooks live as long as these
        for chunk, part in enumerate(chunks):
            for name, parameter in part.named_parameters():
                number = buffers.places[name][1]
                if overlap and (self._groups[number].shard_group or self._groups[number].replicate_group):
                    self._watch(parameter, chunk, number)
        self._missing = [*self._watched]  # gradients of the last backward passes that have not come yet

    def _watch(self, parameter: nn.Parameter, chunk: int, number: int) -> None:
        """Learn when the parameter's gradient is complete: its node runs after all its uses, also if a layer has put
        the gradient into the buffer itself and autograd sees none."""
        node = get_gradient_edge(parameter).node
        ready = partial(self._ready, number)
        node.register_hook(lambda *_: self._last[chunk](ready) if chunk in self._last else None)
        self._nodes.append(node)
        self._watched[number] += 1

    def expect_last(self, chunk: int, later: Later) -> None:
        """The chunk's next backward brings the last gradients of the step. Transfers that their arrival starts are
        given to `later`, which runs them after the weight gradients that this backward has deferred so far."""
        self._last[chunk] = later

    def _ready(self, number: int) -> None:
        self._missing[number] -= 1
        while len(self._started) < len(self._missing) and self._missing[len(self._started)] == 0:
            self._start_next()

    def _start_next(self) -> None:
        number = len(self._started)
        groups, bucket = self._groups[number], self._buffers.gradient_buckets[number]
        pending = None
        if groups.shard_group is not None:
            pending = bucket_reduce_scatter(bucket, groups.shard_group, comm_dtype=self._comm_dtype)
        elif groups.replicate_group is not None:
            pending = bucket_all_reduce(bucket, groups.replicate_group, comm_dtype=self._comm_dtype)
        self._started.append(pending)

    def finish(self) -> None:
        """Return when `buffers.gradients` hold the sums over all ranks that hold the same parameters."""
        while len(self._started) < len(self._groups):
            self._start_next()
        across: list[Pending] = []
        for groups, pending, own in zip(self._groups, self._started, self._buffers.gradients, strict=True):
            if pending is not None:
                pending.wait()
            if groups.shard_group is not None and groups.replicate_group is not None:
                across.append(bucket_all_reduce(own, groups.replicate_group, comm_dtype=self._comm_dtype))
        for pending in across:
            pending.wait()
        self._missing, self._started = [*self._watched], []
        self._last.clear()


class ParameterGather:
    """Phase 3: makes the parameter buckets whole from the slices of the ranks that share state.

    Whoever waits for them does so within a `waiting()`.
    """

    def __init__(
        self,
        buffers: TrainingBuffers,
        replicas: Mapping[Kind, ReplicaGroups],
        *,
        overlap: bool = True,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._buffers, self._overlap, self._waiting = buffers, overlap, waiting
        self._groups = [replicas[bucket.buffer.kind].shard_group for bucket in buffers.layout.buckets]
        self._pending: dict[int, Pending] = {}  # by bucket
        self._buckets_of: dict[str, set[int]] = {}  # by part of the model
        for name, (_, number) in buffers.places.items():
            self._buckets_of.setdefault(part_of(name), set()).add(number)

    def start(self) -> None:
        """Send this rank's slices. Nobody may write to the parameters before `finish`."""
        assert not self._pending, "the parameters of the step before are still on their way"
        for number, group in reversed([*enumerate(self._groups)]):
            if group is not None:
                self._pending[number] = bucket_all_gather(self._buffers.parameter_buckets[number], group)
        if not self._overlap:
            self.finish()

    def wait_for(self, part: str) -> None:
        """Return when all parameters of this part of the model (see `part_of`) are there."""
        self._wait_for(self._buckets_of.get(part, set()) & self._pending.keys())

    def finish(self) -> None:
        """Return when all parameters are there."""
        self._wait_for(set(self._pending))

    def _wait_for(self, numbers: set[int]) -> None:
        for number in sorted(numbers, reverse=True):  # as they were started
            with self._waiting():
                self._pending.pop(number).wait()


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to: `blocks.3`, `embedding`, `final_norm`, `head`."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first

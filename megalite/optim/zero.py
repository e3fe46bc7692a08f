"""ZeRO-1: ranks that hold the same parameters divide the optimizer's state (Rajbhandari et al. 2019, arXiv 1910.02054).

Ranks with the same parameters (dp x cp, for experts edp) form replicas of the optimizer. Within a replica each rank
owns an equal slice of every bucket (layout/buffer_layout.py); a bucket travels in three phases of a step:

1. Reduce, during backward: once the last gradient of a bucket is there, a reduce-scatter over `shard_group` gives each
   rank the sum of its slice. At the end, several replicas (hybrid sharding) add up their slices: an all-reduce over
   `replicate_group`. Unsharded (zero=0), the whole bucket is all-reduced over `replicate_group` during backward.
2. Update: each rank updates the masters of its slices and rounds them into its slices of the parameters (adamw.py).
3. Gather, during the next forward: an all-gather over `shard_group` makes the parameters whole, in the order in which
   forward uses them. A part of the model waits for its buckets right before it is used.

           last backward                     step                      next forward
    ready 0 | ready 1 | ready 2      update own slices      wait N | block 0 | wait N-1 | block 1
    scatter 0 > scatter 1 > scatter 2 > replicas > partial sums > clip > update > gather N > gather N-1 > ...

All ranks of a group start transfers in the order of the buckets: a bucket that is ready waits for those before it.
Where a parameter had no gradient on some rank, its bucket and those behind it are sent in `finish`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from megalite.launch.context import ParallelContext
from megalite.layout.buffer_layout import Kind
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.rank_buffers import KINDS, replica_groups
from megalite.tensor_parallel.deferred import Later

PIECE = 1 << 19  # elements of a message on gloo: with larger ones, its reduces send more


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
        groups = {}
        for kind in KINDS:
            shard, same = replica_groups(kind, zero=zero, instances=instances)
            shard_group, replicate_group = (context.group(name) if name else None for name in (shard, same))
            groups[kind] = cls(shard_group, replicate_group, replicate_group.rank() if replicate_group else 0)
        return groups


class GradientSync:
    """Phase 1: sums the gradient buckets over ranks; each rank receives its slices.

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
        self._groups = [replicas[bucket.kind] for bucket in buffers.layout.buckets]
        self._watched = [0] * len(self._groups)  # by bucket: gradients that the last backward passes bring
        self._last: dict[int, Later] = {}  # by chunk whose last gradients are coming: the queue of its transfers
        self._started: list[Transfer | None] = []
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
        """The chunk's next backward brings the last gradients of the step. A bucket's transfer is queued with `later`,
        so that it starts after the weight gradients deferred before it."""
        self._last[chunk] = later

    def _ready(self, number: int) -> None:
        self._missing[number] -= 1
        while len(self._started) < len(self._missing) and self._missing[len(self._started)] == 0:
            self._start_next()

    def _start_next(self) -> None:
        number = len(self._started)
        groups, bucket = self._groups[number], self._buffers.gradient_buckets[number]
        transfer = None
        if groups.shard_group is not None:
            transfer = bucket_reduce_scatter(bucket, groups.shard_group, comm_dtype=self._comm_dtype)
        elif groups.replicate_group is not None:
            transfer = bucket_all_reduce(bucket, groups.replicate_group, comm_dtype=self._comm_dtype)
        self._started.append(transfer)

    def finish(self) -> None:
        """`buffers.gradients` hold the sums over all ranks with the same parameters, for what this stream does next."""
        while len(self._started) < len(self._groups):
            self._start_next()
        across: list[Transfer] = []
        for groups, transfer, own in zip(self._groups, self._started, self._buffers.gradients, strict=True):
            if transfer is not None:
                transfer.wait()
            if groups.shard_group is not None and groups.replicate_group is not None:
                across.append(bucket_all_reduce(own, groups.replicate_group, comm_dtype=self._comm_dtype))
        for transfer in across:
            transfer.wait()
        self._missing, self._started = [*self._watched], []
        self._last.clear()


class ParameterGather:
    """Phase 3: makes the parameter buckets whole from the slices of the ranks that share state.

    `waiting()` times each wait.
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
        self._groups = [replicas[bucket.kind].shard_group for bucket in buffers.layout.buckets]
        self._pending: dict[int, Transfer] = {}  # by bucket
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
        """All parameters of this part of the model (see `part_of`) are there for what this stream does next."""
        for number in sorted(self._buckets_of.get(part, set()) & self._pending.keys(), reverse=True):  # as started
            with self._waiting():
                self._pending.pop(number).wait()

    def finish(self) -> None:
        """All parameters are there for what this stream does next."""
        for part in reversed(self._buckets_of):
            self.wait_for(part)


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to: `blocks.3`, `embedding`, `final_norm`, `head`."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first


@dataclass(frozen=True)
class Transfer:
    """A transfer that was started. Nobody may touch its tensor until `wait` has returned."""

    works: Sequence[dist.Work]
    result: Tensor  # in the dtype that travels
    target: Tensor

    def wait(self) -> None:
        """Return once the result may be used: on CUDA, by what is issued next on this stream."""
        for work in reversed(self.works):  # gloo: when a rank dies, the piece under way fails only after the timeout
            work.wait()
        if self.result.dtype != self.target.dtype:
            self.target.copy_(self.result)


def bucket_reduce_scatter(bucket: Tensor, group: dist.ProcessGroup, *, comm_dtype: torch.dtype) -> Transfer:
    """Starts: rank i's slice [i*B/n, (i+1)*B/n) of `bucket` [B] becomes the sum of that slice over the n ranks.

    The rest of the bucket may hold anything afterwards. Terms travel and are added in `comm_dtype`.
    """
    carried = bucket.to(comm_dtype)
    own = carried.chunk(group.size())[group.rank()]
    if dist.get_backend(group) == "gloo":
        pieces = _pieces(carried, group)
        works = [dist.reduce(piece, group=group, group_dst=rank, async_op=True) for rank, piece in pieces]
    else:  # this name, at the group, is the same in all versions of torch
        works = [group._reduce_scatter_base(own, carried, dist.ReduceScatterOptions())]
    return Transfer(works, own, bucket.chunk(group.size())[group.rank()])


def bucket_all_reduce(tensor: Tensor, group: dist.ProcessGroup, *, comm_dtype: torch.dtype) -> Transfer:
    """Starts: `tensor` becomes its sum over the ranks, in the same bits on all of them."""
    carried = tensor.to(comm_dtype)
    return Transfer([group.allreduce([carried])], carried, tensor)


def bucket_all_gather(bucket: Tensor, group: dist.ProcessGroup) -> Transfer:
    """Starts: rank i's slice [i*B/n, (i+1)*B/n) of `bucket` [B] comes to the same place in every rank's, for all i."""
    if dist.get_backend(group) == "gloo":
        pieces = _pieces(bucket, group)
        works = [dist.broadcast(piece, group=group, group_src=rank, async_op=True) for rank, piece in pieces]
    else:
        works = [group._allgather_base(bucket, bucket.chunk(group.size())[group.rank()])]
    return Transfer(works, bucket, bucket)


def _pieces(bucket: Tensor, group: dist.ProcessGroup) -> list[tuple[int, Tensor]]:
    """The slice of each rank in pieces, for gloo, whose own reduce-scatter and gather take two to three times as long
    as a reduce or broadcast of each piece. When a rank dies, pieces behind the one that is under way fail at once."""
    return [(rank, piece) for rank, part in enumerate(bucket.chunk(group.size())) for piece in part.split(PIECE)]

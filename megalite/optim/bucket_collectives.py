"""The sums and gathers of ZeRO-1 (zero.py), by the primitives that are fastest on each backend.

Each function starts a transfer and returns at once; `wait` ends it. On all backends the result depends on the ranks'
numbers alone, never on timing; ranks that receive the same part receive the same bits. Beside the tensor a transfer
takes one copy in `comm_dtype`, if that is another dtype; on gloo at most STAGING_BYTES, but for an all-reduce.

The ranks of a group must start the same transfers in the same order, and wait for sums in the same order
(for gathers in any). Nobody may touch the tensor until `wait` has returned, and each Pending is waited for once. A
dropped one touches no memory afterwards, but jams gloo's connection: the next transfer fails after the group's timeout.

NCCL has these collectives, in place. gloo's reduce-scatter is slower than its all-reduce, so there ranks send each
other the slices, straight out of the bucket, and add up what they receive in order of rank: a sum does not depend on
how parameters are cut into buckets. 64 MiB of fp32 between 2 ranks cost each 13 ms of CPU time, torch's reduce-scatter
53, its all-to-all 46 and its all-reduce 25; a gather costs 14, torch's 47. All-reduces in fp32 and fp64 are torch's
own: they cost no more, and move on while nobody waits. 16-bit floats it would add slowly, and round after each term.
Pairs of gloo ranks deliver in order what is sent under one tag, so one tag is enough.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

STAGING_BYTES = 4 << 20  # what a transfer on gloo takes beside the tensor, for all peers together
CHUNK_BYTES = 512 << 10  # per message: smaller ones cost more, larger ones gain nothing and outlive a dead peer
WINDOW = 2  # chunks from each peer under way: one travels while the one before it is added up
TAG = 0


@dataclass(frozen=True)
class Pending:
    """A transfer that was started."""

    wait: Callable[[], None]  # returns once the result may be used: on CUDA, by what is issued next on this stream


def bucket_reduce_scatter(bucket: Tensor, group: dist.ProcessGroup, *, comm_dtype: torch.dtype) -> Pending:
    """Rank i's slice [i*B/n, (i+1)*B/n) of `bucket` [B] becomes the sum of that slice over the n ranks.

    The rest of the bucket may hold anything afterwards. `comm_dtype` is the dtype that travels: the bucket's or a float
    of at most half its size. Then gloo adds in the bucket's dtype (a rank's own term unrounded), NCCL in `comm_dtype`.
    """
    _check(bucket, group, comm_dtype)
    slices = bucket.chunk(group.size())
    if _is_gloo(group):
        return Pending(_Sum(slices, group, comm_dtype).wait)
    carried = bucket.to(comm_dtype)
    part = carried.chunk(group.size())[group.rank()]
    work = group._reduce_scatter_base(part, carried, dist.ReduceScatterOptions())
    return _collective(work, part, slices[group.rank()])


def bucket_all_reduce(tensor: Tensor, group: dist.ProcessGroup, *, comm_dtype: torch.dtype) -> Pending:
    """`tensor` [B] becomes its sum over the ranks. B need not be a multiple of n.

    With a `comm_dtype` other than the tensor's dtype (see bucket_reduce_scatter) the sum, too, is rounded to it.
    """
    _check(tensor, group, comm_dtype, even=False)
    if not _is_gloo(group) or (comm_dtype == tensor.dtype and comm_dtype.itemsize >= 4):
        carried = tensor.to(comm_dtype)
        return _collective(group.allreduce([carried]), carried, tensor)
    sums = [_Sum(tensor.tensor_split(group.size()), group, comm_dtype)]  # each rank sums one slice

    def wait() -> None:
        sums.pop().wait()  # what it took beside the tensor is free for what follows
        carried = tensor.to(comm_dtype)
        _start_gather(carried.tensor_split(group.size()), group).wait()
        if carried is not tensor:
            tensor.copy_(carried)

    return Pending(wait)


def bucket_all_gather(bucket: Tensor, group: dist.ProcessGroup) -> Pending:
    """Rank i's slice [i*B/n, (i+1)*B/n) of `bucket` [B] comes to the same place in every rank's, for all i."""
    _check(bucket, group, bucket.dtype)
    slices = bucket.chunk(group.size())
    if _is_gloo(group):
        return _start_gather(slices, group)
    return _collective(group._allgather_base(bucket, slices[group.rank()]), bucket, bucket)


def _check(tensor: Tensor, group: dist.ProcessGroup, comm_dtype: torch.dtype, *, even: bool = True) -> None:
    assert tensor.dim() == 1
    assert tensor.is_contiguous()
    assert not (even and tensor.numel() % group.size()), f"{tensor.numel()} elements on {group.size()} ranks"
    narrower = comm_dtype.is_floating_point and 2 * comm_dtype.itemsize <= tensor.dtype.itemsize
    assert comm_dtype == tensor.dtype or narrower, f"{tensor.dtype} cannot travel as {comm_dtype}"
    assert tensor.is_cpu or not _is_gloo(group)


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "gloo"


def _peers(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of the group; each begins with its successor, so that not all turn to the same one first."""
    return [(group.rank() + distance) % group.size() for distance in range(1, group.size())]


def _collective(work: dist.Work, result: Tensor, target: Tensor) -> Pending:
    """A collective of torch (its name at the group is the same in all versions, not so in torch.distributed), whose
    result in another dtype is then copied to where it belongs."""

    def wait() -> None:
        work.wait()
        if result.dtype != target.dtype:
            target.copy_(result)

    return Pending(wait)


def _start_gather(slices: Sequence[Tensor], group: dist.ProcessGroup) -> Pending:
    """Every slice goes straight from its rank's tensor into all others', in messages of CHUNK_BYTES.

    All ranks post equally many messages, also if slices differ in length: torch counts them.
    """
    size, longest = CHUNK_BYTES // slices[0].itemsize, max(part.numel() for part in slices)
    messages = [[part[start : start + size] for start in range(0, longest, size)] for part in slices]
    own, peers = messages[group.rank()], _peers(group)
    receives = [group.recv([message], peer, TAG) for peer in peers for message in messages[peer]]
    sends = [group.send([message], peer, TAG) for peer in peers for message in own]

    def wait() -> None:
        _finish(receives, group)
        _finish(sends, group)

    return Pending(wait)


def _finish(works: Sequence[dist.Work], group: dist.ProcessGroup) -> None:
    """Return when these sends, or receives, are done.

    When a peer dies, gloo fails at once what is queued, but not what is half through: who waits for that does so until
    the timeout is over. Hence short messages, and the last ones are waited for first; after that it is rare. The
    timeout is asked for each time, as messages, unlike collectives, would keep to that with which their group was made.
    """
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    for work in reversed(works):
        work.wait(timeout)


class _Sum:
    """Every rank sends all others their slices and adds up, in order of rank, what it receives for its own slice.

    Slices are cut into chunks of one length; where they differ in length, some chunks of the last step are empty.
    WINDOW steps are under way at a time. Both ends of a pair post step after step, transfer after transfer: so the k-th
    send meets the k-th receive.
    """

    def __init__(self, slices: Sequence[Tensor], group: dist.ProcessGroup, comm_dtype: torch.dtype) -> None:
        self._slices, self._group, self._comm_dtype = slices, group, comm_dtype
        self._rank, self._peers = group.rank(), _peers(group)
        own, longest = slices[self._rank], max(part.numel() for part in slices)
        copies = 2 if comm_dtype != own.dtype else 1  # of a chunk for each peer: what arrives, and what is narrowed
        room = copies * WINDOW * len(self._peers) * comm_dtype.itemsize + own.itemsize  # the last: to add
        self._chunk = max(1, min(longest, CHUNK_BYTES // comm_dtype.itemsize, STAGING_BYTES // room))
        steps = -(-longest // self._chunk) if self._peers else 0
        self._arrived = torch.empty(min(WINDOW, steps), len(self._peers), self._chunk, dtype=comm_dtype)
        self._steps = iter(range(steps))
        # For each step: this rank's chunk, the terms that arrive for it by rank, receives and sends.
        self._under_way: deque[tuple[Tensor, dict[int, Tensor], list[dist.Work], list[dist.Work]]] = deque()
        for _ in range(WINDOW):
            self._post_next()

    def wait(self) -> None:
        while self._under_way:
            self._finish_first()  # what it sent is free before the next step takes as much
            self._post_next()

    def _finish_first(self) -> None:
        own, arriving, receives, sends = self._under_way.popleft()
        _finish(receives, self._group)
        self._add(own, arriving)
        _finish(sends, self._group)

    def _post_next(self) -> None:
        step = next(self._steps, None)
        if step is None:
            return
        own, *others = (
            self._slices[rank][step * self._chunk : (step + 1) * self._chunk] for rank in (self._rank, *self._peers)
        )
        room = self._arrived[step % len(self._arrived), :, : own.numel()]
        receives = [self._group.recv([part], peer, TAG) for peer, part in zip(self._peers, room, strict=True)]
        leaving = [part.to(self._comm_dtype) for part in others]
        sends = [self._group.send([part], peer, TAG) for peer, part in zip(self._peers, leaving, strict=True)]
        self._under_way.append((own, dict(zip(self._peers, room, strict=True)), receives, sends))

    def _add(self, own: Tensor, arrived: dict[int, Tensor]) -> None:
        """0 + 1 + ... up to this rank, then its own term, then the rest."""
        if self._rank > 0:
            before = arrived[0].to(own.dtype)
            for rank in range(1, self._rank):
                before.add_(arrived[rank])
            own.add_(before)
        for rank in range(self._rank + 1, self._group.size()):
            own.add_(arrived[rank])

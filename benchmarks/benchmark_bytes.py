"""Bytes that a rank sends in a step: counted at the primitives, worked out by the formula, counted by the sockets.

The first two are equal to the byte where megalite sends what it says; the third knows nothing of either, and adds the
headers of messages.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from megalite.train.build import Training

LONGEST_FIGURE = 64  # bytes: a step also sums its tokens, norm and loss, where even small models have kilobytes
TCPI_BYTES_SENT = 200  # offset in Linux's struct tcp_info; bytes sent again, which are among them, come next

Transfer = Literal["reduce_scatter", "all_reduce", "all_gather"]


def bytes_sent(transfer: Transfer, elements: int, ranks: int, comm_dtype: torch.dtype) -> int:
    """Bytes that each of `ranks` ranks sends through gloo for a tensor of `elements`, a multiple of `ranks`.

    Headers are left out, a hundred bytes or so a message. gloo's reduces send 1 / ranks more than a ring's.
    """
    slices = {"all_reduce": 2 * ranks, "all_gather": ranks, "reduce_scatter": ranks + 1}[transfer]  # by `ranks`
    return slices * (ranks - 1) * (elements // ranks) * comm_dtype.itemsize // ranks


class Primitives:
    """Counts the bytes that this process sends by the primitives of process groups, a step's few figures left out."""

    COLLECTIVES: Mapping[str, Transfer] = {
        "allreduce": "all_reduce",
        "broadcast": "all_gather",  # from each rank, of its slice
        "reduce": "reduce_scatter",
    }

    def __init__(self) -> None:
        self.sent = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Within it, and in Python alone: torch's own reducers call the primitives of C++."""
        with contextlib.ExitStack() as stack:
            for name in ("send", *self.COLLECTIVES):
                counting = self._counting(getattr(dist.ProcessGroup, name), self.COLLECTIVES.get(name))
                stack.callback(setattr, dist.ProcessGroup, name, vars(dist.ProcessGroup)[name])
                setattr(dist.ProcessGroup, name, counting)
            yield

    def _counting(self, original: Callable[..., Any], transfer: Transfer | None) -> Callable[..., Any]:
        def counting(group: dist.ProcessGroup, *args: Any) -> Any:
            (tensor,) = args[0]
            ranks, root = group.size(), getattr(args[-1], "rootRank", None)  # of a rank's own slice all that travels
            if transfer and root in (None, group.rank()) and tensor.nbytes > LONGEST_FIGURE:
                elements = tensor.numel() * (1 if root is None else ranks)
                self.sent += bytes_sent(transfer, elements, ranks, tensor.dtype)
            elif transfer is None:
                self.sent += tensor.nbytes
            return original(group, *args)

        return counting


def bytes_by_formula(training: Training, comm_dtype: torch.dtype) -> int:
    """Bytes that a rank sends in one step: gradients of all buckets as `comm_dtype`; sharded, parameters too."""
    sent = 0
    for bucket, parameters in zip(training.buffers.layout.buckets, training.buffers.parameter_buckets, strict=True):
        sharing, elements = training.replicas[bucket.kind], parameters.numel()
        if sharing.shard_group is not None:
            sent += bytes_sent("reduce_scatter", elements, sharing.shard_group.size(), comm_dtype)
            sent += bytes_sent("all_gather", elements, sharing.shard_group.size(), parameters.dtype)
        if sharing.replicate_group is not None:
            sent += bytes_sent("all_reduce", elements // bucket.shards, sharing.replicate_group.size(), comm_dtype)
    return sent


def bytes_on_the_wire() -> int:
    """Bytes that this process's TCP sockets have sent by Linux's count, headers of messages included."""
    sent = 0
    sockets = [name for name in os.listdir("/proc/self/fd") if _is_socket(name)]
    for name in sockets:
        with socket.socket(fileno=os.dup(int(name))) as connection, contextlib.suppress(OSError):  # where it is not TCP
            information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            all_sent, sent_again = struct.unpack_from("QQ", information, TCPI_BYTES_SENT)
            sent += all_sent - sent_again  # on a busy machine even the loopback sends again
    return sent


def _is_socket(descriptor: str) -> bool:
    with contextlib.suppress(FileNotFoundError):  # the one that listed them is closed
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return False

"""The error of a checkpoint that one rank could not write or read, raised on every rank: all go on, or all stop.

A full disk on one node or a read-only mount on rank 0 is reported to all ranks before any rank acts on it. Failures of
the storage become a `CheckpointError`; anything else is a bug and keeps its type.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megalite.launch.context import ParallelContext

T = TypeVar("T")


class CheckpointError(Exception):
    """A checkpoint was not saved, or cannot be read. One line for people; earlier checkpoints are untouched."""


class StorageFailure(Exception):  # noqa: N818  # never leaves this package
    """Some rank's storage failed: what happened and where, the same text on every rank."""


def gather_to_first(context: ParallelContext, value: list[Any]) -> list[list[Any]]:
    """Every rank's list of JSON values, by rank, on rank 0; nothing on the others, which a long list would burden."""
    if context.control_group is None:
        return [value]
    payload = json.dumps(value).encode()
    longest = torch.tensor([len(payload)])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=context.control_group)
    padded = torch.frombuffer(bytearray(payload.ljust(int(longest), b" ")), dtype=torch.uint8)
    received = [torch.empty_like(padded) for _ in range(context.world_size)] if context.rank == 0 else None
    dist.gather(padded, received, dst=0, group=context.control_group)
    return [json.loads(payload.numpy().tobytes()) for payload in received or []]


def on_first(context: ParallelContext, action: Callable[[], Any]) -> Any:
    """The JSON value that `action` returns on rank 0, which alone performs it, or the same failure on every rank."""
    return context.broadcast_object(together(context, lambda: action() if context.rank == 0 else None))


def together(context: ParallelContext, action: Callable[[], T]) -> T:
    """The result of `action` on this rank, or the same StorageFailure on every rank if any rank's raised an OSError.

    All ranks call it at the same point; it returns or raises only after all of them have finished the action.
    """
    failure: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    report = [] if failure is None else [isinstance(failure, OSError), _describe(failure)]
    failed = [(rank, *entry) for rank, entry in enumerate(context.gather_json(report)) if entry]
    if not failed:
        return result  # type: ignore[return-value]  # no failure: `action` returned it
    others = f", and on {len(failed) - 1} more ranks" if len(failed) > 1 else ""
    rank, _, description = failed[0]
    message = f"{description} on rank {rank}{others}"
    if all(of_storage for _, of_storage, _ in failed):
        raise StorageFailure(message) from failure
    if failure is not None and not isinstance(failure, OSError):
        raise failure
    raise RuntimeError(message)


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"

"""A checkpoint that could not be written: the same error on every rank, so that all of them go on, or all stop.

Whatever one rank alone runs into (a full disk on its node, a read-only mount on rank 0) is told to all before anyone
acts on it. Failures of the storage become one `CheckpointError`; anything else is a bug and keeps its type.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megalite.parallel.context import ParallelContext

T = TypeVar("T")


class CheckpointError(Exception):
    """A checkpoint was not saved, or cannot be read. One line for people; earlier checkpoints are untouched."""


class StorageFailure(Exception):  # noqa: N818  # never leaves this package
    """Some rank's storage failed: what happened and where, the same text on every rank."""


def gather(context: ParallelContext, said: list[Any]) -> list[list[Any]]:
    """Every rank's list of JSON values, by rank."""
    return context.gather_json(said)


def gather_to_first(context: ParallelContext, said: list[Any]) -> list[list[Any]] | None:
    """Every rank's list of JSON values, by rank, on rank 0; None on the others, which a long list would only burden."""
    if context.control_group is None:
        return [said]
    payload = json.dumps(said).encode()
    longest = torch.tensor([len(payload)])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=context.control_group)
    padded = torch.frombuffer(bytearray(payload.ljust(int(longest), b" ")), dtype=torch.uint8)
    received = [torch.empty_like(padded) for _ in range(context.world_size)] if context.rank == 0 else None
    dist.gather(padded, received, dst=0, group=context.control_group)
    return None if received is None else [json.loads(payload.numpy().tobytes()) for payload in received]


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
    said = [] if failure is None else [isinstance(failure, OSError), _in_words(failure)]
    failed = [(rank, *words) for rank, words in enumerate(gather(context, said)) if words]
    if not failed:
        return result  # type: ignore[return-value]  # no failure: `action` returned it
    others = f", and on {len(failed) - 1} more ranks" if len(failed) > 1 else ""
    rank, _, words = failed[0]
    message = f"{words} on rank {rank}{others}"
    if all(of_storage for _, of_storage, _ in failed):
        raise StorageFailure(message) from failure
    if failure is not None and not isinstance(failure, OSError):
        raise failure
    raise RuntimeError(message)


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"

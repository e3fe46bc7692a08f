"""Raises an error that one rank meets on all ranks, at the same point: all go on, or all stop."""

from collections.abc import Callable
from typing import Any, TypeVar

from megalite.errors.problems import Problem, UserError
from megalite.launch.context import ParallelContext

T = TypeVar("T")


class StorageFailure(Exception):  # noqa: N818  # its callers turn it into an error for people
    """Some rank's storage failed: what happened and where, the same text on every rank."""


def all_ranks_or_raise(context: ParallelContext, action: Callable[[], T], *, patient: bool = False) -> T:
    """The result of `action` on this rank, or an error on all ranks if any rank's failed, once all have finished it.

    Refusals become one UserError with the problems of all ranks, and OSErrors become one StorageFailure. Anything else
    is a bug: it keeps its type, and is a RuntimeError on the other ranks. `patient`: the action may take one rank
    longer than parallel.timeout_s.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    if patient:
        context.barrier(patient=True)
    words: list[Any] = [] if failure is None else ["bug", f"{type(failure).__name__}: {failure}"]
    if isinstance(failure, UserError):
        words = ["input", [problem.as_json() for problem in failure.problems]]
    elif isinstance(failure, OSError):
        place = f" ({failure.filename})" if failure.filename else ""
        words = ["storage", f"{failure.strerror}{place}" if failure.strerror else words[1]]
    failed = [(rank, *entry) for rank, entry in enumerate(context.gather_json(words)) if entry]
    if not failed:
        return result  # type: ignore[return-value]  # no rank's action has failed
    if bugs := [f"{message} on rank {rank}" for rank, kind, message in failed if kind == "bug"]:
        raise failure if failure and words[0] == "bug" else RuntimeError(bugs[0])
    if refused := [each for _, kind, problems in failed if kind == "input" for each in problems]:
        raise UserError(list(dict.fromkeys(Problem(**fields) for fields in refused)))
    raise StorageFailure("; ".join(f"{message} on rank {rank}" for rank, _, message in failed[:3])) from failure


def rank0_broadcast(context: ParallelContext, action: Callable[[], Any], *, patient: bool = False) -> Any:
    """The JSON value that `action` returns on rank 0, which alone performs it, or the same failure on every rank."""
    value = all_ranks_or_raise(context, lambda: action() if context.rank == 0 else None, patient=patient)
    return context.broadcast_object(value)

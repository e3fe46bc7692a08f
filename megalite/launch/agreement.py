"""Raises an error that one rank meets on all ranks, at the same point: all go on, or all stop."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megalite.errors.problems import Problem, UserError
from megalite.launch.context import ParallelContext, problem_fields

T = TypeVar("T")


class StorageFailure(Exception):  # noqa: N818  # its callers turn it into an error for people
    """Some rank's storage failed: what happened and where, the same text on every rank."""


def together(context: ParallelContext, action: Callable[[], T], *, patient: bool = False) -> T:
    """The result of `action` on this rank, or an error on all ranks if any rank's failed, once all have finished it.

    Refusals become one UserError with the problems of all ranks, and OSErrors become one StorageFailure. Anything else
    is a bug: it keeps its type, and is a RuntimeError on the other ranks. `patient`: the action may take one rank
    longer than parallel.timeout_s.
    """
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    if patient:
        context.barrier(patient=True)
    said = context.gather_json([] if failure is None else _kind_and_words(failure))
    failed = [(rank, *entry) for rank, entry in enumerate(said) if entry]
    if not failed:
        return result
    kinds = {kind for _, kind, _ in failed}
    if "input" in kinds and "bug" not in kinds:
        told = (problems for _, kind, problems in failed if kind == "input")
        raise UserError(list(dict.fromkeys(Problem(**fields) for problems in told for fields in problems)))
    others = f", and on {len(failed) - 1} more ranks" if len(failed) > 1 else ""
    message = f"{failed[0][2]} on rank {failed[0][0]}{others}"
    if kinds == {"storage"}:
        raise StorageFailure(message) from failure
    raise failure if failure is not None and _kind_and_words(failure)[0] == "bug" else RuntimeError(message)


def agree(context: ParallelContext, problems: Sequence[Problem]) -> None:
    """Raise one UserError on all ranks if any rank has a problem. Ranks without problems call it with none."""

    def refuse() -> None:
        if problems:
            raise UserError(list(problems))

    together(context, refuse)


def on_first(context: ParallelContext, action: Callable[[], Any], *, patient: bool = False) -> Any:
    """The JSON value that `action` returns on rank 0, which alone performs it, or the same failure on every rank."""
    value = together(context, lambda: action() if context.rank == 0 else None, patient=patient)
    return context.broadcast_object(value)


def _kind_and_words(error: Exception) -> list[Any]:
    if isinstance(error, UserError):
        return ["input", [problem_fields(problem) for problem in error.problems]]
    if isinstance(error, OSError) and error.strerror:
        return ["storage", f"{error.strerror} ({error.filename})" if error.filename else error.strerror]
    return ["storage" if isinstance(error, OSError) else "bug", f"{type(error).__name__}: {error}"]

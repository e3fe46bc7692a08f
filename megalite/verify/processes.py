"""Runs the processes of verify_layout.py: all ranks of the layout, and the one process that they are compared to.

They are forks of one server that has imported torch once and has run nothing (a process that ran threaded operations
must not fork); the caller itself imports no torch. Nobody waits for ever: a rank that dies, fails or does not answer is
a `RankFailure` that says which, and where it was.
"""

import faulthandler
import multiprocessing
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

from megalite.config.schema import Config
from megalite.errors.problems import UserError
from megalite.verify.compare import Trace

ECHO_S = 2.0  # how long the cause of a failure may take to show after its first echo, or a stack to be written

TrainRank = Callable[[Config, Any], Trace]  # given a config and this rank's ParallelContext


class RankFailure(Exception):  # noqa: N818 - it is what happened, told to the user
    """A process failed, died or hung; the message is for the user."""


class Failure(NamedTuple):
    """What a process answers in place of a trace. The first one by time is the cause, the others are its echoes."""

    at: float
    cause: UserError | str


def run_processes(
    config: Config, world_size: int, reference: Config, *, timeout_s: float, train: TrainRank | None = None
) -> tuple[list[Trace], Trace]:
    """What each rank computed, in order of rank, and what one process did with `reference`.

    `train` (default: that of rank.py) is what a rank of the layout runs; it lives at the top of a module.
    """
    multiprocessing.set_forkserver_preload(["torch", "megalite.verify.rank"])
    context, processes = multiprocessing.get_context("forkserver"), list[ForkServerProcess]()
    jobs = [(f"rank {rank}", (config, rank, world_size, train)) for rank in range(world_size)]
    jobs.append(("the single process", (reference, 0, 1, None)))
    with tempfile.TemporaryDirectory(prefix="megalite-verify-") as place:
        try:
            for name, job in jobs:
                arguments = (Path(place), name, timeout_s, *job)
                processes.append(context.Process(target=_serve, args=arguments, name=name, daemon=True))
                processes[-1].start()
            *traces, expected = _answers(processes, Path(place), time.monotonic() + timeout_s + ECHO_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return traces, expected


def _answers(processes: Sequence[ForkServerProcess], folder: Path, deadline: float) -> list[Trace]:
    """All traces, or the failure that explains why there are none. A process that ends well leaves a file.

    A process that hangs stays alive until all are ended: its end would look like a failure to those it exchanges with.
    """
    waiting = {process.sentinel: process for process in processes}
    answers: dict[str, Trace] = {}
    failures: list[tuple[Failure, str]] = []
    while waiting and (
        ready := wait(list(waiting), timeout=ECHO_S if failures else max(0.0, deadline - time.monotonic()))
    ):
        for process in [waiting.pop(sentinel) for sentinel in list(waiting) if sentinel in ready]:
            process.join()
            answer = folder / f"{process.name}.answer"
            found = pickle.loads(answer.read_bytes()) if process.exitcode == 0 else _death(process.exitcode or 0)
            if isinstance(found, Failure):
                failures.append((found, process.name))
            else:
                answers[process.name] = found
    if waiting and not failures:
        failures = [(_silence(folder / f"{process.name}.stacks"), process.name) for process in waiting.values()]
    if failures:
        first = min(failure.at for failure, _ in failures)
        at_first = {name: failure.cause for failure, name in failures if failure.at == first}
        causes = {process.name: at_first[process.name] for process in processes if process.name in at_first}
        for cause in causes.values():
            if isinstance(cause, UserError):
                raise cause
        raise RankFailure("\n".join(f"{name} {cause}" for name, cause in causes.items()))
    return [answers[process.name] for process in processes]


def _death(status: int) -> Failure:
    """Of those that died, all are causes."""
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
    return Failure(0, f"died {how}" + (" (out of memory?)" if status == -signal.SIGKILL else ""))


def _silence(stacks: Path) -> Failure:
    stood = stacks.read_text() if stacks.exists() else ""
    return Failure(0, f"did not answer in time: a collective that not all ranks join, or slow. It stood at\n{stood}")


def _serve(
    folder: Path, name: str, timeout_s: float, config: Config, rank: int, world_size: int, train: TrainRank | None
) -> None:
    """One process: join the others, train, leave the answer; or, when the time is up, where it stands."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's, who ends everybody
    from megalite.verify.rank import enter
    from megalite.verify.rank import train as train_rank

    with (folder / f"{name}.stacks").open("w") as stacks:
        faulthandler.dump_traceback_later(timeout_s, file=stacks)
        try:
            context = enter(config, rank, world_size, folder / "store")
            answer: Trace | Failure = (train or train_rank)(config, context)
            context.close()
        except UserError as error:
            answer = Failure(time.monotonic(), error)
        except Exception:
            answer = Failure(time.monotonic(), f"failed:\n{traceback.format_exc()}")
        faulthandler.cancel_dump_traceback_later()
    (folder / f"{name}.answer").write_bytes(pickle.dumps(answer))

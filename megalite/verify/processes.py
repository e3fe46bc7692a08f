"""Runs the processes of verify_layout.py: all ranks of the layout, and the one process that they are compared to.

They are forks of one server that has imported torch once and has run nothing (a process that ran threaded operations
must not fork); the caller itself imports no torch. Nobody waits for ever: a rank that dies, fails or does not answer is
a `RankFailure` that says which, and where it was.
"""

import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import megalite
from megalite.config.schema import Config
from megalite.errors.problems import UserError
from megalite.verify.compare import Trace

PRELOADED = ["torch", "megalite.verify.rank"]
ECHO_S = 1.0  # how long the cause of a failure may take to show after its first echo
STAND_S = 1.0  # how long a rank that hangs may take to write down where it stands

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
    start_server()
    context, processes = multiprocessing.get_context("forkserver"), list[ForkServerProcess]()
    jobs = [(f"rank {rank}", (config, rank, world_size, train)) for rank in range(world_size)]
    jobs.append(("the single process", (reference, 0, 1, None)))
    with tempfile.TemporaryDirectory(prefix="megalite-verify-") as place:
        try:
            for name, job in jobs:
                arguments = (Path(place), name, *job)
                processes.append(context.Process(target=_serve, args=arguments, name=name, daemon=True))
                processes[-1].start()
            *traces, expected = _answers(processes, Path(place), timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return traces, expected


def start_server() -> None:
    """Start the parent of all processes, unless there is one already. It imports torch while the caller goes on."""
    package = str(Path(megalite.__file__).parent.parent)
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    multiprocessing.set_forkserver_preload(PRELOADED)
    before = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=path)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is the caller's, who ends everybody
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
        signal.signal(signal.SIGINT, interrupt)


def _answers(processes: Sequence[ForkServerProcess], folder: Path, timeout_s: float) -> list[Trace]:
    """All traces, or the failure that explains why there are none. A process that ends well leaves a file."""
    deadline, waiting = time.monotonic() + timeout_s, {process.sentinel: process for process in processes}
    answers: dict[str, Trace | Failure] = {}
    while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
        for process in [waiting.pop(sentinel) for sentinel in list(waiting) if sentinel in ready]:
            process.join()
            answer: Trace | Failure = Failure(0, _death(process.exitcode or 0))
            if process.exitcode == 0:
                answer = pickle.loads((folder / f"{process.name}.answer").read_bytes())
            answers[process.name] = answer
            if isinstance(answer, Failure):  # an echo may be faster than its cause
                deadline = min(deadline, time.monotonic() + ECHO_S)
    failures = {name: answer for name, answer in answers.items() if isinstance(answer, Failure)}
    if failures:
        name, (_, cause) = min(failures.items(), key=lambda failure: failure[1].at)
        raise cause if isinstance(cause, UserError) else RankFailure(f"{name} {cause}")
    if silent := [process.name for process in waiting.values()]:
        for process in waiting.values():
            assert process.pid, "it was started"
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(STAND_S)
        text = (
            f"no answer from {', '.join(silent)} within {timeout_s:g} s: a collective that not all ranks join, or slow"
        )
        stacks = {name: folder / f"{name}.stacks" for name in silent}
        stood = [f"--- {name} stood at ---\n{path.read_text()}" for name, path in stacks.items() if path.exists()]
        raise RankFailure("\n".join([text, *stood]))
    return [answer for process in processes if isinstance(answer := answers[process.name], Trace)]


def _death(status: int) -> str:
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
    return f"died {how}" + (" (out of memory?)" if status == -signal.SIGKILL else "")


def _serve(folder: Path, name: str, config: Config, rank: int, world_size: int, train: TrainRank | None) -> None:
    """One process: join the others, train, leave the answer; where it stands, if it is asked."""
    if not folder.is_dir():  # the caller was interrupted while the server imported torch
        return
    from megalite.verify.rank import enter
    from megalite.verify.rank import train as train_rank

    with (folder / f"{name}.stacks").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            context = enter(config, rank, world_size, folder / "store")
            answer: Trace | Failure = (train or train_rank)(config, context)
            context.close()
        except UserError as error:
            answer = Failure(time.monotonic(), error)
        except Exception:
            answer = Failure(time.monotonic(), f"failed:\n{traceback.format_exc()}")
        (folder / f"{name}.answer").write_bytes(pickle.dumps(answer))
        faulthandler.unregister(signal.SIGUSR1)

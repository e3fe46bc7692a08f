"""Runs the processes of verify_layout.py: all ranks of the layout, and the one process that they are compared to.

They are forks of one server that has imported torch once and has run nothing (a process that ran threaded operations
must not fork); the caller itself imports no torch. Nobody waits for ever: a rank that dies, fails or does not answer is
a `RankFailure` that says which, and where it was.
"""

import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import megalite
from megalite.config.schema import Config
from megalite.errors.problems import UserError
from megalite.verify.compare import Trace

PRELOADED = ["torch", "megalite.verify.rank"]
ECHO_S = 1.0  # how long the cause of a failure may take to show after its first echo
STACKS = 0.9  # of the time limit: when a rank that is still at work writes down where it is

TrainRank = Callable[[Config, Any], Trace]  # given a config and this rank's ParallelContext


class RankFailure(Exception):  # noqa: N818 - it is what happened, told to the user
    """A process failed, died or hung; the message is for the user."""


@dataclass(frozen=True)
class _Failure:
    """What a process sends in place of a trace. The first one by time is the cause, the others are its echoes."""

    at: float
    cause: UserError | str


@dataclass(frozen=True)
class _Member:
    """The parent's hold on one process."""

    name: str
    process: ForkServerProcess
    answers: Connection
    stacks: Path

    def answer(self) -> Trace | _Failure:
        try:
            answer: Trace | _Failure = self.answers.recv()
            return answer
        except EOFError:
            self.process.join()
            status = self.process.exitcode or 0
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
            return _Failure(0, f"died {how}" + (" (out of memory?)" if status == -signal.SIGKILL else ""))

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.answers.close()


def run_processes(
    config: Config, world_size: int, reference: Config, *, timeout_s: float, train: TrainRank | None = None
) -> tuple[list[Trace], Trace]:
    """What each rank computed, in order of rank, and what one process did with `reference`.

    `train` (default: that of rank.py) is what a rank of the layout runs; it lives at the top of a module.
    """
    start_server()
    jobs = [(f"rank {rank}", (config, rank, world_size, train)) for rank in range(world_size)]
    jobs.append(("the single process", (reference, 0, 1, None)))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megalite-verify-")))
        members = []
        for number, (name, job) in enumerate(jobs):
            members.append(_started(name, job, folder, folder / f"stacks-{number}", timeout_s))
            stack.callback(members[-1].end)
        *traces, expected = _collect(members, timeout_s)
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


def _started(name: str, job: Sequence[Any], folder: Path, stacks: Path, timeout_s: float) -> _Member:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender, job, folder, stacks, timeout_s), name=name, daemon=True)
    process.start()
    sender.close()  # so that the death of the process reads as end of file
    return _Member(name, process, receiver, stacks)


def _collect(members: Sequence[_Member], timeout_s: float) -> list[Trace]:
    """All traces, or the failure that explains why there are none."""
    deadline = time.monotonic() + timeout_s
    traces: dict[str, Trace] = {}
    failures: list[tuple[str, _Failure]] = []
    waiting = {member.answers: member for member in members}
    while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            member = waiting.pop(connection)
            answer = member.answer()
            if isinstance(answer, Trace):
                traces[member.name] = answer
            else:  # an echo may be faster than its cause
                failures.append((member.name, answer))
                deadline = min(deadline, time.monotonic() + ECHO_S)
    if failures:
        name, first = min(failures, key=lambda failure: failure[1].at)
        raise first.cause if isinstance(first.cause, UserError) else RankFailure(f"{name} {first.cause}")
    if waiting:
        raise RankFailure(_hang([*waiting.values()], timeout_s))
    return [traces[member.name] for member in members]


def _hang(silent: Sequence[_Member], timeout_s: float) -> str:
    names = ", ".join(member.name for member in silent)
    lines = [f"no answer from {names} within {timeout_s:g} s: a collective that not all ranks join, or a slow machine"]
    lines += [f"--- {one.name} stood at ---\n{one.stacks.read_text()}" for one in silent if one.stacks.exists()]
    return "\n".join(lines)


def _serve(sender: Connection, job: Sequence[Any], folder: Path, stacks: Path, timeout_s: float) -> None:
    """One process: join the others, train, send what came of it."""
    if not folder.is_dir():  # the caller was interrupted while the server imported torch
        return
    from megalite.verify.rank import enter
    from megalite.verify.rank import train as train_rank

    with stacks.open("w") as file:
        faulthandler.dump_traceback_later(timeout_s * STACKS, file=file)
        config, rank, world_size, train = job
        try:
            context = enter(config, rank, world_size, folder / "store")
            trace = (train or train_rank)(config, context)
        except UserError as error:
            sender.send(_Failure(time.monotonic(), error))
        except Exception:
            sender.send(_Failure(time.monotonic(), f"failed:\n{traceback.format_exc()}"))
        else:
            sender.send(trace)
            context.close()
        faulthandler.cancel_dump_traceback_later()

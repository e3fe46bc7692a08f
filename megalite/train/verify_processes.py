"""Processes of verify_layout.py: all ranks of the layout, and beside them the one process they are compared to.

They are forks of one server that has imported torch once and has run nothing (a process that ran threaded operations
must not fork); the caller itself imports no torch. Nobody waits for ever: a rank that dies, fails or stops answering is
a `RankFailure` that says which, and where it stood.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import megalite
from megalite.config.problems import UserError
from megalite.config.schema import Config
from megalite.train.verify_compare import Trace

PRELOADED = ["torch", "megalite.train.verify_rank"]
ECHO_S = 1.0  # how long the cause of a failure may take to show after its first echo
STACKS = 0.9  # of the time limit: when a rank that is still at work writes down where it stands

TrainRank = Callable[[Config, Any], Trace]  # given a config and this rank's ParallelContext


class RankFailure(Exception):  # noqa: N818 - it is what happened, told to the user
    """A process failed, died or hung; the message is for the user."""


@dataclass(frozen=True)
class _Answer:
    """What a process sends back. `at` orders failures: the first is the cause, the rest its echoes."""

    at: float
    trace: Trace | None = None
    failure: str = ""
    refusal: UserError | None = None


@dataclass(frozen=True)
class _Member:
    """The parent's hold on one process."""

    name: str
    process: ForkServerProcess
    answers: Connection
    stacks: Path


def run_processes(
    config: Config, world_size: int, reference: Config, *, timeout_s: float, train: TrainRank | None = None
) -> tuple[list[Trace], Trace]:
    """What each rank computed, in order of rank, and what one process did with `reference`.

    `train` (default: that of verify_rank.py) is what a rank of the layout runs; it lives at the top of a module.
    """
    start_server()
    jobs = [(f"rank {rank}", config, rank, world_size, train) for rank in range(world_size)]
    jobs.append(("the single process", reference, 0, 1, None))
    with tempfile.TemporaryDirectory(prefix="megalite-verify-") as folder:
        members: list[_Member] = []
        try:
            for number, (name, *job) in enumerate(jobs):
                members.append(_started(name, number, job, Path(folder), timeout_s))
            *traces, expected = _collect(members, time.monotonic() + timeout_s, timeout_s)
        finally:
            for member in members:
                member.process.kill()
                member.process.join()
                member.answers.close()
    return traces, expected


def start_server() -> None:
    """Start the parent of all processes, unless there is one already. It imports torch while the caller goes on."""
    package = str(Path(megalite.__file__).parent.parent)
    path = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    changed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    before = {name: os.environ.get(name) for name in changed}
    multiprocessing.set_forkserver_preload(PRELOADED)
    os.environ.update(changed)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is the caller's, who ends everybody
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, interrupt)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _started(name: str, number: int, job: Sequence[Any], folder: Path, timeout_s: float) -> _Member:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    stacks = folder / f"stacks-{number}"
    arguments = (sender, pickle.dumps(job), str(folder / "store"), str(stacks), timeout_s)
    process = context.Process(target=_serve, args=arguments, name=name, daemon=True)
    process.start()
    sender.close()  # so that the death of the process reads as end of file
    return _Member(name, process, receiver, stacks)


def _collect(members: Sequence[_Member], deadline: float, timeout_s: float) -> list[Trace]:
    """All traces, or the failure that explains why there are none."""
    answers: dict[str, _Answer] = {}
    waiting = {member.answers: member for member in members}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        failed = [answer for answer in answers.values() if answer.trace is None]
        if not ready and not failed:
            raise RankFailure(_hang(list(waiting.values()), timeout_s))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            member = waiting.pop(connection)
            answers[member.name] = _receive(member)
            if answers[member.name].trace is None:  # an echo may be faster than its cause
                deadline = min(deadline, time.monotonic() + ECHO_S)
    traces = [answer.trace for member in members if (answer := answers.get(member.name))]
    complete = [trace for trace in traces if trace is not None]
    if len(complete) == len(members):
        return complete
    name, first = min(
        ((name, answer) for name, answer in answers.items() if answer.trace is None), key=lambda item: item[1].at
    )
    if first.refusal is not None:
        raise first.refusal
    raise RankFailure(f"{name} {first.failure}")


def _receive(member: _Member) -> _Answer:
    try:
        answer = pickle.loads(member.answers.recv_bytes())
        assert isinstance(answer, _Answer)
        return answer
    except EOFError:
        member.process.join()
        status = member.process.exitcode or 0
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
        return _Answer(at=0, failure=f"died {how}" + (" (out of memory?)" if status == -signal.SIGKILL else ""))


def _hang(silent: Sequence[_Member], timeout_s: float) -> str:
    names = ", ".join(member.name for member in silent)
    lines = [f"no answer from {names} within {timeout_s:g} s: a collective that not all ranks join, or a slow machine"]
    for member in silent:
        if member.stacks.exists():
            lines.append(f"--- {member.name} stood at ---\n{member.stacks.read_text()}")
    return "\n".join(lines)


def _serve(sender: Connection, job: bytes, meeting: str, stacks: str, timeout_s: float) -> None:
    """One process: join the others, train, send what came of it."""
    if not Path(stacks).parent.is_dir():  # the caller was interrupted while the server imported torch
        return
    from megalite.train.verify_rank import enter, leave
    from megalite.train.verify_rank import train as train_rank

    with open(stacks, "w") as file:
        faulthandler.dump_traceback_later(timeout_s * STACKS, file=file)
        context = None
        try:
            config, rank, world_size, train = pickle.loads(job)
            context = enter(config, rank, world_size, Path(meeting), 2 * timeout_s)
            answer = _Answer(time.monotonic(), trace=(train or train_rank)(config, context))
        except UserError as error:
            answer = _Answer(time.monotonic(), refusal=error)
        except Exception:
            answer = _Answer(time.monotonic(), failure=f"failed:\n{traceback.format_exc()}")
        sender.send_bytes(pickle.dumps(answer))
        if context is not None and answer.trace is not None:
            leave(context)
        faulthandler.cancel_dump_traceback_later()

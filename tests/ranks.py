"""Real gloo ranks for tests, without a torch import each.

`run_ranks` forks its processes from a warm forkserver: torch and megalite are imported once, one thread each. (A plain
fork of the test process hangs once that has run threaded torch operations.) The children get the environment variables
of the moment the first case ran, not those a later test sets. The function must live at the top of a module, and that
module is imported in every rank: keep heavy imports such as transformers out of it or inside other functions.
"""

import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import pkgutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import megalite
from megalite.layout.ranks import GroupNeeds, ParallelLayout

REPOSITORY = Path(__file__).resolve().parent.parent


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    dtype: Any = None,
    layout: ParallelLayout | None = None,
    needs: GroupNeeds | None = None,
    may_die: Collection[int] = (),
) -> list[Any]:
    """`function(context, *args)` in `world_size` gloo ranks; the results, by rank.

    The ranks have the groups of `layout` (default: dp = world_size) and `needs`.
    The first exception of a rank is raised here, its traceback as the cause. A rank that dies without a word is an
    error, unless `may_die` holds it: then its result is None. After `timeout` seconds everything is killed, and the
    error says which ranks had not answered and where they stood. `dtype` is the context's (default fp32).
    """
    start_forkserver()
    with tempfile.TemporaryDirectory(prefix="megalite-ranks-") as folder:
        job = pickle.dumps((function, args, dtype, layout or ParallelLayout(dp=world_size), needs))
        ranks = [_Rank.started(rank, world_size, Path(folder), job, timeout) for rank in range(world_size)]
        try:
            return _collect(ranks, time.monotonic() + timeout, set(may_die))
        finally:
            for rank in ranks:
                if rank.process.is_alive():
                    rank.process.kill()
                rank.process.join()
                rank.answers.close()


def start_forkserver() -> None:
    """Start the warm parent of all ranks, once per test process."""
    path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    changed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    before = {name: os.environ.get(name) for name in changed}
    multiprocessing.set_forkserver_preload(["tests.ranks_preload"])
    os.environ.update(changed)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def preloaded_modules() -> list[str]:
    """What the forkserver imports: every module of megalite that can be imported, what tests import, and what torch
    imports when it first needs it (a backward pass from given gradients imports sympy, recomputation the compiler: a
    second in each rank)."""
    modules = [module.name for module in pkgutil.walk_packages(megalite.__path__, "megalite.")]
    return [
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "torch.profiler",
        "torch.utils.flop_counter",
        "torch.fx.experimental.symbolic_shapes",
        "pytest",
        "numpy.ma",
        "numpy.random",
        *modules,
    ]


ECHO_S = 1.0  # how long the cause of a failure may take to show after its first echo


@dataclass(frozen=True)
class _Answer:
    """What a rank sends back. `at` orders failures: the first is the cause, the rest its echoes."""

    at: float
    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    died: bool = False


class RankError(Exception):
    """The traceback of a rank's exception, shown as its cause."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True)
class _Rank:
    """The parent's hold on one rank."""

    number: int
    process: ForkServerProcess
    answers: Connection
    stacks: Path  # where the rank writes its stacks shortly before the time is up

    @classmethod
    def started(cls, rank: int, world_size: int, folder: Path, job: bytes, timeout: float) -> "_Rank":
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, job, rank, world_size, str(folder), timeout)
        process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=False)
        process.start()
        sender.close()  # so that the death of the rank reads as end of file
        return cls(rank, process, receiver, folder / f"stacks-{rank}")


def _collect(ranks: list[_Rank], deadline: float, may_die: set[int]) -> list[Any]:
    """The results of all ranks, or the error that explains why there are none."""
    results: dict[int, Any] = {}
    failures: list[_Answer] = []
    waiting = {rank.answers: rank for rank in ranks}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and not failures:
            raise TimeoutError(_describe_hang(list(waiting.values())))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            answer = _receive(rank)
            if answer.error is not None and not (answer.died and rank.number in may_die):
                failures.append(answer)
            results[rank.number] = answer.result
        if failures:  # an echo may be faster than its cause
            deadline = min(deadline, time.monotonic() + ECHO_S)
    if failures:
        first = min(failures, key=lambda answer: answer.at)
        assert first.error is not None
        raise first.error from (RankError(first.trace) if first.trace else None)
    return [results[rank.number] for rank in ranks]


def _receive(rank: _Rank) -> _Answer:
    try:
        answer = pickle.loads(rank.answers.recv_bytes())
        assert isinstance(answer, _Answer)
        return answer
    except EOFError:
        rank.process.join()
        status = rank.process.exitcode or 0
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
        return _Answer(at=0, error=RuntimeError(f"rank {rank.number} died {how}"), died=True)


def _describe_hang(silent: list[_Rank]) -> str:
    lines = [f"no answer from rank(s) {', '.join(str(rank.number) for rank in silent)}"]
    for rank in silent:
        if rank.stacks.exists():
            lines.append(f"--- rank {rank.number} ---\n{rank.stacks.read_text()}")
    return "\n".join(lines)


def _serve(sender: Connection, job: bytes, rank: int, world_size: int, folder: str, timeout: float) -> None:
    """One rank: join the others at a file, run the function, send what came of it."""
    import torch
    import torch.distributed as dist

    from megalite.launch.context import ParallelContext
    from megalite.launch.startup import join

    torch.set_num_threads(1)
    with open(Path(folder) / f"stacks-{rank}", "w") as stacks:
        faulthandler.dump_traceback_later(timeout * 0.9, file=stacks)
        context = None
        try:
            function, args, dtype, layout, needs = pickle.loads(job)
            store = dist.FileStore(str(Path(folder) / "store"), world_size)
            place = ParallelContext(layout, rank, dtype=dtype or torch.float32, store=store)
            context = join(place, timeout_s=2 * timeout, needs=needs)
            context.barrier()  # a rank that ends at once must not break connections that others still make
            answer = _Answer(time.monotonic(), function(context, *args))
        except BaseException as error:
            answer = _Answer(time.monotonic(), error=_picklable(error), trace=traceback.format_exc())
        try:
            payload = pickle.dumps(answer)
        except Exception as error:
            payload = pickle.dumps(_Answer(time.monotonic(), error=TypeError(f"rank {rank}'s result: {error}")))
        sender.send_bytes(payload)
        if context is not None:
            context.close()
        faulthandler.cancel_dump_traceback_later()


def _picklable(error: BaseException) -> BaseException:
    """The error itself where it survives a round trip, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")

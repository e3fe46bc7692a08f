"""What a process takes of its host: cores, the memory that a step frees, open files. No torch import."""

import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megalite.errors.problems import Problem, UserError
from megalite.layout.groups import GroupSpec

SPINS = "2000"  # libgomp takes 1,000 by itself where it knows of more threads than cores, else 300,000
LOAD = Path("/proc/loadavg")  # its fourth word: how many threads run or could run, of how many
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
OF_THE_USER = ("trim_threshold", "mmap_threshold", "mmap_max", "top_pad")  # MALLOC_TRIM_THRESHOLD_, or a tunable
BESIDES = 128  # open files: the interpreter's own, pipes, logs, token files, a checkpoint that is being written
OF_A_GROUP = 4  # what gloo opens for a group besides its connections: 4, seen for groups of 2 to 6 ranks
CUDA_QUEUES, ENOUGH_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 8  # CUDA's own default
NVIDIA = Path("/dev/nvidiactl")  # where its driver runs
ENOUGH = 65_536  # open files, for any number of token files


def usable_cores() -> int:
    """Cores that this process may run on: fewer than the machine has under SLURM, taskset or a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def limit_openmp_spinning(environ: MutableMapping[str, str]) -> None:
    """Have OpenMP threads sleep soon while they wait for each other if others need the cores, unless the user has
    decided.

    libgomp reads the variable once, at torch's import. Left alone, its threads spin for milliseconds: best on a quiet
    machine, where small operations else cost a wake-up each (nanoGPT's shape for CPUs: 58 ms a step with 2,000 spins,
    41 with libgomp's 300,000). Beside a busy process they spin on the core that it, or the thread they wait for, needs
    (`tiny`: 890 ms a step, with 2,000 spins 560). No number suits both, so the start looks who is running.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys() and is_busy():
        environ["GOMP_SPINCOUNT"] = SPINS


def is_busy(source: Path = LOAD, looks: int = 20) -> bool:
    """Whether others run on the cores that this process would take, by several looks within 40 ms. False where Linux
    does not tell."""
    running = 0
    for _ in range(looks):
        try:
            running += int(source.read_text(encoding="ascii").split()[3].partition("/")[0]) - 1  # without this one
        except (OSError, ValueError, IndexError):
            return False
        time.sleep(0.002)
    return running / looks + usable_cores() > (os.cpu_count() or 1) + 0.5


def let_cuda_segments_grow(environ: MutableMapping[str, str]) -> None:
    """Have torch's CUDA allocator map pages into segments that grow, unless the user has decided otherwise.

    Without it a piece that fits no gap takes a segment of its own: gaps of many GiB where sizes change (evaluation, a
    batch ramp, experts). torch reads the variable once, when it is imported.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environ.keys():
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def cuda_queues_in_words(environ: Mapping[str, str]) -> str:
    """How many queues of a device CUDA is told to take for streams, and what that means."""
    told = environ.get(CUDA_QUEUES, "")
    too_few = told.isdigit() and int(told) < ENOUGH_QUEUES
    return f"{told}, too few: kernels of different streams wait for each other" if too_few else told or "unset"


def widen_cuda_queues(environ: MutableMapping[str, str], driver: Path = NVIDIA) -> str:
    """Give streams queues of their own, in words, where an environment for Megatron-LM forbids it; empty: it does not.

    Megatron-LM asks for 1, which orders its kernels by their launches. Transfers here are ordered by events and would
    wait for products. CUDA reads the variable once, so this comes before torch.
    """
    words = cuda_queues_in_words(environ)
    if "too few" not in words or not driver.exists():
        return ""
    environ[CUDA_QUEUES] = str(ENOUGH_QUEUES)
    return f"megalite: {CUDA_QUEUES}={words}: it is {ENOUGH_QUEUES} in this process"


def listen_on_loopback(environ: MutableMapping[str, str]) -> None:
    """Have gloo, whose ranks are all on this host, listen where no other reaches it, unless the user has decided."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if name is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", name)


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Have glibc keep what is freed, unless the user has decided otherwise. Other C libraries are left as they are.

    Every step frees and allocates the same activations. glibc returns large or last pieces to the system, which then
    clears each page anew: 2 % to 10 % of a step. The price: sizes that change from step to step leave gaps in the heap.
    """
    tunables = environ.get("GLIBC_TUNABLES", "")
    decided = any(f"MALLOC_{name.upper()}_" in environ or f"glibc.malloc.{name}=" in tunables for name in OF_THE_USER)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not decided:
        mallopt(M_MMAP_MAX, 0)  # large pieces from the heap, too
        mallopt(M_TRIM_THRESHOLD, -1)  # and the heap is never cut


def end_compile_workers() -> None:
    """Kill inductor's compile workers, where there are any: when Python ends torch asks them to, and waits for up to
    five minutes for some that do not hear it (pytorch#162199)."""
    inductor: Any = sys.modules.get("torch._inductor.async_compile")
    pools = [pool for pool in getattr(inductor, "_pool_set", ()) if hasattr(pool, "process")]  # which has the workers
    for pool in pools:
        if pool.process.poll() is None:
            pid, pool.running = pool.process.pid, False  # else a thread tells of an end that it did not expect
            if pool.timer:
                pool.timer.quit()
            children = Path(f"/proc/{pid}/task/{pid}/children")
            for one in (pid, *(children.read_text(encoding="ascii").split() if children.exists() else ())):
                with suppress(ProcessLookupError):
                    os.kill(int(one), signal.SIGKILL)
    if pools:
        inductor.after_fork()  # forgets them: whoever compiles again has new ones


def files_of(specs: Iterable[GroupSpec], world_size: int, *, on_gpu: bool) -> int:
    """An upper bound of the files that a rank of these groups has open at a time.

    Gloo connects each rank of a group with every other one, so a world of a thousand ranks reaches the 1,024 that a
    shell usually allows.
    """
    by_gloo = {(spec.traffic, spec.ranks) for spec in specs if spec.on_host or not on_gpu}
    sizes = [world_size, *(len(ranks) for _, ranks in by_gloo if len(ranks) > 1)]  # the first: the control group
    store = world_size  # rank 0 serves the store of the rendezvous
    return BESIDES + store + sum(size - 1 + OF_A_GROUP for size in sizes)


def allow_open_files(needed: int = 0) -> None:
    """Raise this process's limit of open files to ENOUGH, as far as that is allowed; UserError if `needed` is not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if most < needed:
        rule = f"the connections between so many ranks need up to {needed:,} open files in one process"
        remedy = f"ulimit -Hn {needed} or more (limits.conf, slurmd's LimitNOFILE, docker run --ulimit nofile={needed})"
        raise UserError(Problem("ulimit -Hn", hard, rule, remedy))
    if soft != resource.RLIM_INFINITY and soft < max(needed, ENOUGH):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, max(needed, ENOUGH)), hard))

"""What a process takes of its host: cores, the memory that a step frees, open files. No torch import.

Each function leaves a variable alone that the user has set.
"""

import ctypes
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

SPINS = "2000"  # libgomp takes 1,000 by itself where it knows of more threads than cores, else 300,000
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
ENOUGH = 65_536  # open files, for thousands of ranks and any number of token files
CUDA_QUEUES, ENOUGH_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 8  # CUDA's own default
NVIDIA = Path("/dev/nvidiactl")  # where its driver runs


def usable_cores() -> int:
    """Cores that this process may run on: fewer than the machine has under SLURM, taskset or a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def limit_openmp_spinning(environ: MutableMapping[str, str]) -> None:
    """Have OpenMP threads sleep soon while they wait for each other if others need the cores.

    libgomp reads the variable once, at torch's import. Left alone, its threads spin for milliseconds: best on a quiet
    machine, where small operations else cost a wake-up each (nanoGPT's shape for CPUs: 58 ms a step with 2,000 spins,
    41 with libgomp's 300,000). Beside a busy process they spin on the core that it, or the thread they wait for, needs
    (`tiny`: 890 ms a step, with 2,000 spins 560). No number suits both, so the start looks who is running.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys() and is_busy():
        environ["GOMP_SPINCOUNT"] = SPINS


def is_busy(source: Path = Path("/proc/loadavg"), looks: int = 20) -> bool:
    """Whether others run on the cores that this process would take, by several looks within 40 ms. False where Linux
    does not tell."""
    running = 0
    for _ in range(looks):
        try:  # the fourth word: how many threads run or could run, of how many
            running += int(source.read_text(encoding="ascii").split()[3].partition("/")[0]) - 1  # without this one
        except (OSError, ValueError, IndexError):
            return False
        time.sleep(0.002)
    return running / looks + usable_cores() > (os.cpu_count() or 1) + 0.5


def let_cuda_segments_grow(environ: MutableMapping[str, str]) -> None:
    """Have torch's CUDA allocator map pages into segments that grow; torch reads the variable when it is imported.

    Without it a piece that fits no gap takes a segment of its own: gaps of many GiB where sizes change (evaluation, a
    batch ramp, experts).
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def widen_cuda_queues(environ: MutableMapping[str, str], driver: Path = NVIDIA) -> str:
    """Give streams queues of their own where an environment for Megatron-LM forbids it, and say so; else empty.

    Megatron-LM asks for 1, which orders its kernels by their launches. Transfers here are ordered by events and would
    wait for products. CUDA reads the variable once, so this comes before torch.
    """
    given = environ.get(CUDA_QUEUES, "")
    if not given.isdigit() or int(given) >= ENOUGH_QUEUES or not driver.exists():
        return ""
    environ[CUDA_QUEUES] = str(ENOUGH_QUEUES)
    return f"{CUDA_QUEUES}={given} would let streams wait for each other: it is {ENOUGH_QUEUES} in this process"


def listen_on_loopback(environ: MutableMapping[str, str]) -> None:
    """Have gloo, whose ranks are all on this host, listen where no other reaches it."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if name is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", name)


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Have glibc keep what is freed; other C libraries are left as they are.

    Every step frees and allocates the same activations. glibc returns large or last pieces to the system, which then
    clears each page anew: 2 % to 10 % of a step. The price: sizes that change from step to step leave gaps in the heap.
    """
    names = " ".join([*environ, environ.get("GLIBC_TUNABLES", "")])
    decided = re.search("malloc[._](trim|mmap|top_pad)", names, re.IGNORECASE)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not decided:
        mallopt(M_MMAP_MAX, 0)  # large pieces from the heap, too
        mallopt(M_TRIM_THRESHOLD, -1)  # and the heap is never cut


def end_compile_workers() -> None:
    """Kill inductor's compile workers, where there are any: when Python ends torch asks them to, and waits for up to
    five minutes for some that do not hear it (pytorch#162199)."""
    inductor: Any = sys.modules.get("torch._inductor.async_compile")
    pools = [pool for pool in getattr(inductor, "_pool_set", ()) if hasattr(pool, "process")]
    for pool in [pool for pool in pools if pool.process.poll() is None]:
        pid, pool.running = pool.process.pid, False  # else a thread tells of an end that it did not expect
        if pool.timer:
            pool.timer.quit()
        children = Path(f"/proc/{pid}/task/{pid}/children")
        for one in (pid, *(children.read_text(encoding="ascii").split() if children.exists() else ())):
            with suppress(ProcessLookupError):
                os.kill(int(one), signal.SIGKILL)
    if pools:
        inductor.after_fork()  # forgets them: whoever compiles again has new ones


def allow_open_files() -> None:
    """Raise this process's limit of open files to ENOUGH, as far as that is allowed: gloo connects each rank of a group
    with every other one, and rank 0 serves the store of the rendezvous."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))

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
LOAD, NVIDIA = Path("/proc/loadavg"), Path("/dev/nvidiactl")


def usable_cores() -> int:
    """Cores that this process may run on: fewer than the machine has under SLURM, taskset or a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_variables(environ: MutableMapping[str, str]) -> str:
    """Set what libgomp, torch and CUDA read once, when they are loaded; a line where that overrules the user.

    Threads of OpenMP sleep soon if others need the cores. Left alone they spin for milliseconds while they wait for
    each other: best on a quiet machine (nanoGPT's shape for CPUs: 41 ms a step, with 2,000 spins 58), but beside a busy
    process on the core that it, or the thread they wait for, needs (`tiny`: 890 ms a step, with 2,000 spins 560).

    Segments of torch's CUDA memory grow. Else a piece that fits no gap takes a segment of its own: gaps of many GiB
    where sizes change (evaluation, a batch ramp, experts).

    CUDA's streams have queues of their own, where an environment for Megatron-LM forbids it to order kernels by their
    launches. Transfers here are ordered by events and would wait for products.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys() and is_busy():
        environ["GOMP_SPINCOUNT"] = SPINS
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    given = environ.get(CUDA_QUEUES, "")
    if not given.isdigit() or int(given) >= ENOUGH_QUEUES or not NVIDIA.exists():
        return ""
    environ[CUDA_QUEUES] = str(ENOUGH_QUEUES)
    return f"{CUDA_QUEUES}={given} would let streams wait for each other: it is {ENOUGH_QUEUES} in this process"


def is_busy(looks: int = 20) -> bool:
    """Whether others run on the cores that this process would take, by several looks within 40 ms. False where Linux
    does not tell."""
    running = 0
    with suppress(OSError, ValueError, IndexError):
        for _ in range(looks):  # the fourth word: how many threads run or could run, of how many
            running += int(LOAD.read_text(encoding="ascii").split()[3].partition("/")[0]) - 1  # without this one
            time.sleep(0.002)
    return running / looks + usable_cores() > (os.cpu_count() or 1) + 0.5


def listen_on_loopback(environ: MutableMapping[str, str]) -> None:
    """Have gloo, whose ranks are all on this host, listen where no other reaches it."""
    for name in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
        environ.setdefault("GLOO_SOCKET_IFNAME", name)


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Have glibc keep what is freed; other C libraries are left as they are.

    Every step frees and allocates the same activations. glibc returns large or last pieces to the system, which then
    clears each page anew: 2 % to 10 % of a step. The price: sizes that change from step to step leave gaps in the heap.
    """
    decided = re.search(
        "malloc[._](trim|mmap|top_pad)", " ".join([*environ, environ.get("GLIBC_TUNABLES", "")]), re.IGNORECASE
    )
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
        pool.running = False  # else a thread tells of an end that it did not expect
        if pool.timer:
            pool.timer.quit()
        children = Path(f"/proc/{pool.process.pid}/task/{pool.process.pid}/children")
        for pid in (pool.process.pid, *(children.read_text(encoding="ascii").split() if children.exists() else ())):
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    if pools:
        inductor.after_fork()  # forgets them: whoever compiles again has new ones


def allow_open_files() -> None:
    """Raise this process's limit of open files to ENOUGH, as far as that is allowed: gloo connects each rank of a group
    with every other one, and rank 0 serves the store of the rendezvous."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))

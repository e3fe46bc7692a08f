"""What a process takes of its host: cores, the memory that a step frees, open files. No torch import."""

import ctypes
import os
import resource
import sys
from collections.abc import Iterable, Mapping, MutableMapping

from megalite.errors.problems import Problem, UserError
from megalite.layout.groups import GroupSpec

SPINS = "2000"  # libgomp takes 1,000 by itself where it knows of more threads than cores, else 300,000
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
OF_THE_USER = ("trim_threshold", "mmap_threshold", "mmap_max", "top_pad")  # MALLOC_TRIM_THRESHOLD_, or a tunable
BESIDES = 128  # open files: the interpreter's own, pipes, logs, token files, a checkpoint that is being written
OF_A_GROUP = 4  # what gloo opens for a group besides its connections: 4, seen for groups of 2 to 6 ranks


def usable_cores() -> int:
    """Cores that this process may run on: fewer than the machine has under SLURM, taskset or a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def limit_openmp_spinning(environ: MutableMapping[str, str]) -> None:
    """Have OpenMP threads sleep soon while they wait for each other, unless the user has decided otherwise.

    libgomp lets them spin for milliseconds. Where another process runs, they take the core that the thread they wait
    for needs. Where they sleep at once, every piece of Python between two operations costs a wake-up. The variable is
    read once, when torch is imported. The default model in bf16 on 2 cores of an EPYC, median ms per step:

        spins                     1,000   2,000   3,000   10,000   300,000
        quiet machine               238     234     228        -       229
        beside one busy process     480     560     610      890       900
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys():
        environ["GOMP_SPINCOUNT"] = SPINS


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Have glibc keep what is freed, unless the user has decided otherwise. Other C libraries are left as they are.

    Every step frees and allocates the same activations. glibc returns large or last pieces to the system, which then
    clears each page anew: on 2 cores that took 3 % to 7 % of a step of `tiny`, 2 % to 10 % of one of `gpt2`. The price:
    what was needed once stays with the process, and sizes that change from step to step leave gaps in the heap (random
    ones of 33 to 100 MiB: 621 MiB where 348 are needed at a time). It holds for the life of the process.
    """
    tunables = environ.get("GLIBC_TUNABLES", "")
    decided = any(f"MALLOC_{name.upper()}_" in environ or f"glibc.malloc.{name}=" in tunables for name in OF_THE_USER)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not decided:
        mallopt(M_MMAP_MAX, 0)  # large pieces from the heap, too
        mallopt(M_TRIM_THRESHOLD, -1)  # and the heap is never cut


def files_of(specs: Iterable[GroupSpec], world_size: int, *, on_gpu: bool) -> int:
    """An upper bound of the files that a rank of these groups has open at a time.

    Gloo connects each rank of a group with every other one, so a world of a thousand ranks reaches the 1,024 that a
    shell usually allows.
    """
    formed = [spec for spec in specs if len(spec.ranks) > 1 and spec.communicates]
    by_gloo = {(spec.traffic, spec.ranks) for spec in formed if spec.on_host or not on_gpu}
    sizes = [world_size, *(len(ranks) for _, ranks in by_gloo)]  # the first: the control group
    store = world_size  # rank 0 serves the store of the rendezvous
    return BESIDES + store + sum(size - 1 + OF_A_GROUP for size in sizes)


def allow_open_files(needed: int) -> None:
    """Raise this process's limit of open files to `needed`; UserError where the hard limit is below."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        rule = f"the connections between so many ranks need up to {needed:,} open files in one process"
        remedy = f"ulimit -Hn {needed} or more (limits.conf, slurmd's LimitNOFILE, docker run --ulimit nofile={needed})"
        raise UserError(Problem("ulimit -Hn", hard, rule, remedy))
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def allow_more_open_files(count: int) -> None:
    """Raise this process's limit of open files by `count`, as far as is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        more = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))

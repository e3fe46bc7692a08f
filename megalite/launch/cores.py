"""Counts the cores that this process has, and keeps waiting threads from spinning on them. No torch import."""

import os
from collections.abc import MutableMapping

SPINS = "2000"  # libgomp takes 1,000 by itself where it knows of more threads than cores, else 300,000


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

"""How many cores this process has, and how its threads share them with others. No torch import."""

import os
from collections.abc import MutableMapping

SPINS = "1000"  # what libgomp takes by itself where it knows of more threads than cores; else it takes 300,000


def usable_cores() -> int:
    """Cores that this process may run on: fewer than the machine has under SLURM, taskset or a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def let_waiting_threads_sleep(environ: MutableMapping[str, str]) -> None:
    """Have OpenMP threads sleep soon while they wait for each other, unless the user has decided otherwise.

    libgomp lets them spin for milliseconds, on the very core that the thread they wait for would need when another
    process is running. The default model on 2 cores takes 5.7 to 9.7 s per step beside one busy process, so 1.4 s; on a
    quiet machine 401 and 406 ms (medians of 135 steps). It is read once, when torch is imported.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys():
        environ["GOMP_SPINCOUNT"] = SPINS

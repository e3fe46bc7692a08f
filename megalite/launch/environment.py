"""Reads who this process is in the job, and readies it before torch is loaded: variables, files. No torch import.

`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` (torchrun, or anyone) come first. In a SLURM step
(`srun`) without them, SLURM's own variables are translated into them. With neither it is a single process. Everything
wrong is reported at once. A variable of a library is left alone where the user has set it.
"""

import os
import re
import resource
import shlex
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

from megalite.errors.problems import Problem, UserError
from megalite.launch.process import LOOPBACK, Launcher, ProcessEnvironment, is_loopback

FIRST_RESERVED_STEP = 0xFFFFFFF0  # SLURM numbers its batch, extern and interactive shells from here on
OF_SLURM = {  # by torchrun's name, the variable of a SLURM step that says the same
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "MASTER_ADDR": "SLURM_STEP_NODELIST",
}
JOB_BEGAN, OF_TASK, OF_NODE = "MEGALITE_JOB_BEGAN", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"
START = "`torchrun --nproc-per-node N` or `srun --ntasks N` sets it; for one process unset RANK, WORLD_SIZE"
CORES = "as many cores as SLURM gives, or unset it: then the ranks of a node share all cores"
MANY = 10**9
LATEST = 10**10 - 1  # seconds since 1970
SPINS = "2000"  # libgomp takes 1,000 by itself where it knows of more threads than cores, else 300,000
ENOUGH = 65_536  # open files, for thousands of ranks and any number of token files
CUDA_QUEUES, ENOUGH_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 8  # CUDA's own default
LOAD, NVIDIA = Path("/proc/loadavg"), Path("/dev/nvidiactl")


def read_environment(environ: Mapping[str, str]) -> ProcessEnvironment:
    """The process's place, or a UserError with everything that is wrong in the variables."""
    given, problems = _variables(environ), list[Problem]()
    slurm = given is not environ

    def refuse(name: str, rule: str, hint: str = START) -> None:
        """Another machine's variables may be right, and its ranks know nothing of these."""
        own = OF_SLURM.get(name, name) if slurm and not environ.get(name) else name
        problems.append(Problem(own, environ.get(own) or None, rule, hint, here=True, alone=name == "RANK"))

    def number(name: str, least: int, most: int, *, needed: bool = True, hint: str = START) -> int | None:
        text = given.get(name, environ.get(name, "")).strip()
        if re.fullmatch("[0-9]{1,10}", text) and least <= int(text) <= most:
            return int(text)
        if text or needed:
            refuse(name, f"must be a whole number from {least} to {most:,}", hint)
        return None

    began = number(JOB_BEGAN, 0, LATEST, needed=False, hint="seconds since 1970 (date +%s), or unset it")
    if not (given.get("RANK") or given.get("WORLD_SIZE")):
        if problems:
            raise UserError(problems)
        return ProcessEnvironment(threads=_threads(environ, "single", 1), job_began=began)

    size = number("WORLD_SIZE", 1, MANY) or MANY
    rank, port = number("RANK", 0, size - 1), number("MASTER_PORT", 1, 65535, needed=size > 1)
    local_size = number("LOCAL_WORLD_SIZE", 1, size, needed=False)
    local_rank = number("LOCAL_RANK", 0, (local_size or size) - 1, needed=False)
    cores = [number(name, 1, MANY, needed=False, hint=CORES) for name in (OF_TASK, OF_NODE) if slurm]
    address = given.get("MASTER_ADDR") or ("" if size > 1 else LOOPBACK)
    if not address:
        refuse("MASTER_ADDR", "must be the host of rank 0")
    if slurm and environ.get("WORLD_SIZE", "").strip() not in ("", given["WORLD_SIZE"]):
        refuse("WORLD_SIZE", f"differs from the {given['WORLD_SIZE']} tasks of the SLURM step")
    if problems or rank is None:
        raise UserError(problems)
    if local_size is None:  # all ranks share this host where rank 0 is reached by loopback
        local_size = size if is_loopback(address) else (local_rank or 0) + 1
    launcher: Launcher = "slurm" if slurm else "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "env"
    threads = _threads(environ, launcher, local_size, *cores)
    return ProcessEnvironment(rank, size, local_rank, local_size, address, port or 0, launcher, threads, began)


def claimed_rank(environ: Mapping[str, str], name: str = "RANK") -> int:
    """The RANK or LOCAL_RANK that even a broken environment claims, 0 where it claims none: decides who prints."""
    text = _variables(environ).get(name) or "0"
    return int(text) if re.fullmatch("[0-9]{1,10}", text) else 0


def launch_command(environment: ProcessEnvironment, arguments: Sequence[str]) -> str:
    """The command that starts a job of this form again; `arguments` are the script and its own."""
    size, local = environment.world_size, environment.local_world_size
    torchrun = f"torchrun {'--standalone ' if local == size else ''}--nproc-per-node {local}"
    start = {"single": "python", "slurm": f"srun --ntasks {size} python"}.get(environment.launcher, torchrun)
    return f"{start} {shlex.join(arguments)}"


def _variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """`environ` itself; or, in a task of a SLURM step without RANK, what torchrun would set there. (The shells of
    sbatch and salloc are no tasks of a step.)"""
    texts = [environ.get(f"SLURM_{name}", "") for name in ("STEP_ID", "JOB_ID", "NODEID")]
    step, job, node = (int(text) if text.isdecimal() else -1 for text in texts)
    if environ.get("RANK") or not environ.get("SLURM_PROCID") or not 0 <= step < FIRST_RESERVED_STEP:
        return environ
    # The first host of the list: `gpu-a[03-04,9],n1` -> `gpu-a03`.
    first = re.match(r"(?:[^\[\],\s]|\[[0-9][0-9,-]*\])+(?=,|$)", environ.get("SLURM_STEP_NODELIST", "").strip())
    host = re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0]) if first else ""
    nodes = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [count for count, times in nodes for _ in range(int(times or 1))]  # `2(x3),1` -> 2, 2, 2, 1 tasks
    port = 12000 + (job * 31 + step) % 20000  # below the usual ephemeral ports; steps side by side differ
    return {name: environ.get(own, "") for name, own in OF_SLURM.items()} | {
        "LOCAL_WORLD_SIZE": counts[node] if 0 <= node < len(counts) else "",
        "MASTER_ADDR": environ.get("MASTER_ADDR") or host,
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }


def _threads(
    environ: Mapping[str, str], launcher: Launcher, sharers: int, of_task: int | None = None, of_node: int | None = None
) -> int | None:
    """A rank's share of the cores, unless the user has set OMP_NUM_THREADS: on Linux, torchrun's own environment tells
    whether it was the user or torchrun (1 for several ranks). SLURM may have given the step fewer cores, bound to it or
    not; the cores of a task are its share already."""
    chosen, cores = environ.get("OMP_NUM_THREADS"), usable_cores()
    if chosen == "1" and launcher == "torchrun" and sharers > 1:
        with suppress(OSError):
            of_torchrun = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
            chosen = chosen if b"OMP_NUM_THREADS=1" in of_torchrun else None
    cores = min(cores, of_task or of_node or cores)
    return None if chosen else max(1, cores // (1 if of_task else sharers))


def usable_cores() -> int:
    """Cores that this process may run on: fewer than the machine has under SLURM, taskset or a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_variables(environ: MutableMapping[str, str]) -> str:
    """Set what libgomp, torch and CUDA read once, when they are loaded; a line where that overrules the user.

    Threads of OpenMP sleep soon if others need the cores. Left alone they spin for milliseconds while they wait for
    each other: best on a quiet machine (nanoGPT's shape for CPUs: 41 ms a step, with 2,000 spins 58), but not beside a
    busy process (`tiny`: 890 ms a step, with 2,000 spins 560). Segments of torch's CUDA memory grow: else sizes that
    change (evaluation, a batch ramp, experts) leave gaps of many GiB. CUDA's streams have queues of their own, where an
    environment for Megatron-LM forbids it: transfers here are ordered by events and would wait for products.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys() and is_busy():
        environ["GOMP_SPINCOUNT"] = SPINS
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    given = environ.get(CUDA_QUEUES, "")
    if not given.isdecimal() or int(given) >= ENOUGH_QUEUES or not NVIDIA.exists():
        return ""
    environ[CUDA_QUEUES] = str(ENOUGH_QUEUES)
    return f"{CUDA_QUEUES}={given} would let streams wait for each other: it is {ENOUGH_QUEUES} in this process"


def is_busy(looks: int = 20) -> bool:
    """Whether others run on the cores that this process would take, by several looks within 40 ms."""
    running = 0
    for _ in range(looks if LOAD.exists() else 0):  # the fourth word: how many threads run or could run, of how many
        running += int(LOAD.read_text(encoding="ascii").split()[3].partition("/")[0]) - 1  # without this one
        time.sleep(0.002)
    return running / looks + usable_cores() > (os.cpu_count() or 1) + 0.5


def ready_files() -> None:
    """Let closed streams (`>&-`) lead nowhere: else the next files that are opened would take their place. Raise the
    limit of open files to ENOUGH, as far as that is allowed: gloo connects each rank of a group with every other one,
    and rank 0 serves the store of the rendezvous."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        with suppress(ValueError):  # macOS says that there is no limit, and has one
            resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))

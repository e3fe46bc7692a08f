"""Reads who this process is in the job from the environment variables that launchers set.

`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` (torchrun, or anyone) come first. In a SLURM step
(`srun`) without them, SLURM's own variables are translated into them. With neither it is a single process. Everything
wrong is reported at once. No torch import.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megalite.errors.problems import Problem, UserError

FIRST_RESERVED_STEP = 0xFFFFFFF0  # SLURM numbers its batch, extern and interactive shells from here on
OF_SLURM = {  # by torchrun's name, the variable of a SLURM step that says the same
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "MASTER_ADDR": "SLURM_STEP_NODELIST",
}
START = "`torchrun --nproc-per-node N` or `srun --ntasks N` sets it; for one process unset RANK, WORLD_SIZE"
LOOPBACK = "127.0.0.1"
Launcher = Literal["single", "torchrun", "env", "slurm"]


@dataclass(frozen=True)
class ProcessEnvironment:
    """Place of one process among all. `local_rank` is None where the launcher does not set it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    local_world_size: int = 1
    master_addr: str = LOOPBACK
    master_port: int = 0
    launcher: Launcher = "single"


def read_environment(environ: Mapping[str, str]) -> ProcessEnvironment:
    """The process's place, or a UserError with everything that is wrong in the variables."""
    given, problems = _variables(environ), list[Problem]()
    slurm = given is not environ
    if not (given.get("RANK") or given.get("WORLD_SIZE")):
        return ProcessEnvironment()

    def refuse(name: str, rule: str) -> None:
        """Another machine's variables may be right, and its ranks know nothing of these."""
        own = OF_SLURM.get(name, name) if slurm and not environ.get(name) else name
        problems.append(Problem(own, given.get(name) or None, rule, START, here=True, alone=name == "RANK"))

    def number(name: str, least: int, most: int = 10**9, why: str = "") -> int | None:
        text = given.get(name, "").strip()
        if re.fullmatch("[0-9]{1,10}", text) and least <= int(text) <= most:
            return int(text)
        if text:
            refuse(name, f"must be a whole number from {least} to {most:,}{why}")
        return None

    several = ("MASTER_ADDR", "MASTER_PORT") if given.get("WORLD_SIZE") != "1" else ()
    for name in ("RANK", "WORLD_SIZE", *several):
        if not given.get(name):
            refuse(name, "not set, but the process is one of several by its other variables")
    size, local_size, port = number("WORLD_SIZE", 1), number("LOCAL_WORLD_SIZE", 1), number("MASTER_PORT", 1, 65535)
    rank = number("RANK", 0, (size or 10**9) - 1, ", below WORLD_SIZE")
    local_rank = number("LOCAL_RANK", 0, (local_size or 10**9) - 1, ", below LOCAL_WORLD_SIZE")
    if slurm and environ.get("WORLD_SIZE", "").strip() not in ("", given["WORLD_SIZE"]):
        rule = f"differs from the {given['WORLD_SIZE']} tasks of the SLURM step"
        problems.append(Problem("WORLD_SIZE", environ["WORLD_SIZE"], rule, "unset it, or set RANK too", here=True))
    if problems or rank is None or size is None:
        raise UserError(problems)
    address = given.get("MASTER_ADDR") or LOOPBACK
    if local_rank is None and size == 1:
        local_rank = 0
    if local_size is None:  # all ranks share this host where rank 0 is reached by loopback
        local_size = size if is_loopback(address) else (local_rank or 0) + 1
    launcher: Launcher = "slurm" if slurm else "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "env"
    return ProcessEnvironment(rank, size, local_rank, local_size, address, port or 0, launcher)


def is_loopback(host: str) -> bool:
    """Whether the address reaches no other machine."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None


def claimed_rank(environ: Mapping[str, str]) -> int:
    """The rank that even a broken environment claims (0 where it claims none): decides who prints a refusal."""
    text = _variables(environ).get("RANK") or "0"
    return int(text) if re.fullmatch("[0-9]{1,10}", text) else 0


def first_of_node(environ: Mapping[str, str]) -> bool:
    """Whether this process speaks for its machine: the first of its ranks there, or any where that is not known."""
    return (_variables(environ).get("LOCAL_RANK") or "0") == "0"


def launch_command(environment: ProcessEnvironment, arguments: Sequence[str]) -> str:
    """The command that starts a job of this form again; `arguments` are the script and its own."""
    size, local = environment.world_size, environment.local_world_size
    nodes = "--standalone " if local == size else ""
    torchrun = f"torchrun {nodes}--nproc-per-node {local}{'' if nodes else ' ...'}"
    start = {"single": "python", "slurm": f"srun --ntasks {size} python"}.get(environment.launcher, torchrun)
    return f"{start} {shlex.join(arguments)}"


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: `gpu-a[03-04,9],n1` -> `gpu-a03`; empty where it is no such list."""
    first = re.match(r"(?:[^\[\],\s]|\[[0-9][0-9,-]*\])+(?=,|$)", nodelist.strip())
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0]) if first else ""


def _variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """`environ` itself; or, in a task of a SLURM step without RANK, what torchrun would set there.

    The shells of sbatch and salloc are no tasks of a step.
    """
    texts = [environ.get(f"SLURM_{name}", "") for name in ("STEP_ID", "JOB_ID", "NODEID")]
    step, job, node = (int(text) if text.isdigit() else -1 for text in texts)
    if environ.get("RANK") or not environ.get("SLURM_PROCID") or not 0 <= step < FIRST_RESERVED_STEP:
        return environ
    counts = [  # tasks of each node: `2(x3),1` -> [2, 2, 2, 1]
        count
        for count, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        for _ in range(int(nodes or 1))
    ]
    # Below the usual ephemeral ports; steps of a job that run side by side differ.
    port = 12000 + (job * 31 + step) % 20000
    return {name: environ.get(own, "") for name, own in OF_SLURM.items()} | {
        "LOCAL_WORLD_SIZE": counts[node] if 0 <= node < len(counts) else "",
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "")),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }

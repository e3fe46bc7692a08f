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
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "LOCAL_WORLD_SIZE": "SLURM_STEP_TASKS_PER_NODE",
    "MASTER_ADDR": "SLURM_STEP_NODELIST",
}
LOOPBACK = "127.0.0.1"
Launcher = Literal["single", "torchrun", "env", "slurm"]


@dataclass(frozen=True)
class ProcessEnvironment:
    """Place of one process among all. `local_rank` is None where the launcher does not say it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    local_world_size: int = 1
    master_addr: str = LOOPBACK
    master_port: int = 0
    launcher: Launcher = "single"


def read_environment(environ: Mapping[str, str]) -> ProcessEnvironment:
    """The process's place, or a UserError with everything that is wrong in the variables."""
    variables = _variables(environ)
    if not (variables.get("RANK") or variables.get("WORLD_SIZE")):
        return ProcessEnvironment()
    slurm, problems = variables is not environ, []

    def refuse(name: str, rule: str, remedy: str, *, alone: bool = False) -> None:
        """`here`: another machine's variables may be right, and its ranks know nothing of these."""
        value = variables.get(name)
        if slurm and not environ.get(name):
            name, remedy = (
                OF_SLURM[name],
                "start with `srun --ntasks N`, which sets it; for one process unset SLURM_PROCID",
            )
        problems.append(Problem(name, value, rule, remedy, here=True, alone=alone))

    def number(name: str, least: int, most: int) -> int | None:
        """The variable's value. None where it is not set, or wrong, which is noted."""
        text = variables.get(name, "").strip()
        if text and not (re.fullmatch(r"[0-9]{1,19}", text) and least <= int(text) <= most):
            refuse(name, f"must be a whole number from {least} to {most:,}", "let torchrun or srun set it")
            return None
        return int(text) if text else None

    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if not variables.get(name):
            start = "start with `torchrun --nproc-per-node N pretrain_gpt.py`, or set both"
            rule = f"not set, but {OF_SLURM[other] if slurm else other}={variables[other]} is"
            refuse(name, rule, f"{start}; for one process `unset {other}`")
    if slurm and environ.get("WORLD_SIZE", "").strip() not in ("", variables["WORLD_SIZE"]):
        rule = f"differs from the {variables['WORLD_SIZE']} tasks of the SLURM step"
        refuse("WORLD_SIZE", rule, "unset it, or set RANK too")
    world_size, rank = number("WORLD_SIZE", 1, 10**9), number("RANK", 0, 10**9) or 0
    if world_size is not None and rank >= world_size:
        rule, remedy = f"must be below WORLD_SIZE={world_size}", f"0 to {world_size - 1}, each once"
        refuse("RANK", rule, remedy, alone=True)
    for name, example in (("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "a free port there, such as 29500")):
        if world_size != 1 and not variables.get(name):
            refuse(name, "not set, but several processes must find each other", f"{name}={example}")
    address, port = variables.get("MASTER_ADDR") or LOOPBACK, number("MASTER_PORT", 1, 65535)
    local_size = number("LOCAL_WORLD_SIZE", 1, 10**9)
    local_rank = number("LOCAL_RANK", 0, (local_size if local_size and not slurm else 10**9) - 1)
    if problems:
        raise UserError(problems)
    assert world_size is not None, "not set is a problem"
    if world_size == 1 and local_rank is None:
        local_rank = 0
    if local_size is None:  # all ranks share this host where rank 0 is reached by loopback
        local_size = world_size if is_loopback(address) else (local_rank or 0) + 1
    launcher: Launcher = "slurm" if slurm else "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "env"
    return ProcessEnvironment(rank, world_size, local_rank, local_size, address, port or 0, launcher)


def is_loopback(host: str) -> bool:
    """Whether the address reaches no other machine."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None


def claimed_rank(environ: Mapping[str, str]) -> int:
    """The rank that even a broken environment claims (0 where it claims none): decides who prints a refusal."""
    text = _variables(environ).get("RANK") or "0"
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def is_launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process, and not a person."""
    return bool(_variables(environ).get("RANK"))


def first_of_node(environ: Mapping[str, str]) -> bool:
    """Whether this process speaks for its machine: the first of its ranks there, or any where that is not known."""
    return (_variables(environ).get("LOCAL_RANK") or "0") == "0"


def launch_command(environment: ProcessEnvironment, arguments: Sequence[str]) -> str:
    """What starts a job of this form again; `arguments` are the script and its own."""
    command = shlex.join(arguments)
    if environment.launcher == "slurm":
        return f"srun --ntasks {environment.world_size} python {command}"
    if environment.launcher == "single":
        return f"python {command}"
    if environment.launcher == "torchrun" and environment.local_world_size == environment.world_size:
        return f"torchrun --standalone --nproc-per-node {environment.world_size} {command}"
    return f"torchrun --nproc-per-node {environment.local_world_size} ... {command}"  # on every node, as before


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: `gpu-a[03-04,9],n1` -> `gpu-a03`; empty where it is no such list."""
    first = re.match(r"(?:[^\[\],\s]|\[[0-9][0-9,-]*\])+(?=,|$)", nodelist.strip())
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0]) if first else ""


def tasks_per_node(text: str) -> list[int]:
    """SLURM's counts for each node: `2(x3),1` -> [2, 2, 2, 1]."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, nodes in counts for _ in range(int(nodes or 1))]


def _variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """`environ` itself; or, in a task of a SLURM step without RANK, what torchrun would set there.

    Not in the shell of sbatch or salloc, which is no task of a step.
    """
    step, rank = environ.get("SLURM_STEP_ID", ""), environ.get("SLURM_PROCID")
    in_shell = (step.isdigit() and int(step) >= FIRST_RESERVED_STEP) or (not step and rank == "0")
    if environ.get("RANK") or not rank or in_shell:
        return environ

    def first(*names: str) -> str:
        return next((environ[name] for name in names if environ.get(name)), "")

    def number(name: str) -> int:
        return int(environ[name]) if environ.get(name, "").isdigit() else 0

    size = first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    on_one_node = size if environ.get("SLURM_NNODES", "1") == "1" else ""
    counts = tasks_per_node(first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or on_one_node)
    nodes = first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    # Below the usual ephemeral ports; steps of a job that run side by side differ.
    port = 12000 + (number("SLURM_JOB_ID") * 31 + number("SLURM_STEP_ID")) % 20000
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": first("SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": str(counts[min(number("SLURM_NODEID"), len(counts) - 1)]) if counts else "",
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }

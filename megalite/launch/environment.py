"""Reads who this process is in the job from the environment variables that launchers set.

`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` (torchrun, or anyone) come first, then a SLURM step
(`srun`); with neither it is a single process. Everything wrong is reported at once. No torch import.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megalite.errors.problems import Problem, UserError

FIRST_RESERVED_STEP = 0xFFFFFFF0  # SLURM numbers its batch, extern and interactive shells from here on
Launcher = Literal["single", "torchrun", "env", "slurm"]


@dataclass(frozen=True)
class ProcessEnvironment:
    """Place of one process among all. `local_rank` is None where the launcher does not say it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    launcher: Launcher = "single"


def read_environment(environ: Mapping[str, str]) -> ProcessEnvironment:
    """The process's place, or a UserError with everything that is wrong in the variables."""
    variables = _Variables(environ)
    if variables.has("RANK") or (variables.has("WORLD_SIZE") and not _in_slurm_step(environ)):
        found = _from_variables(variables)
    elif _in_slurm_step(environ):
        found = _from_slurm(variables)
    else:
        return ProcessEnvironment()
    if found.world_size > 1 and not _can_be_a_host(found.master_addr):
        variables.refuse("MASTER_ADDR", "is not the name or address of a host", "the host of rank 0", alone=True)
    if variables.problems:
        raise UserError(variables.problems)
    return found


def claimed_rank(environ: Mapping[str, str]) -> int:
    """The rank that even a broken environment claims (0 where it claims none): decides who prints a refusal."""
    text = environ.get("RANK") or (environ.get("SLURM_PROCID") if _in_slurm_step(environ) else None) or "0"
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def first_of_node(environ: Mapping[str, str]) -> bool:
    """Whether this process speaks for its machine: the first of its ranks there, or any where that is not known."""
    return (environ.get("LOCAL_RANK") or environ.get("SLURM_LOCALID") or "0") == "0"


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


def _can_be_a_host(name: str) -> bool:
    """Whether it has the form of one: what a resolver is asked for, it must be able to encode."""
    try:
        return bool(re.fullmatch(r"[\w.:%-]+", name) and name.encode("idna"))
    except UnicodeError:  # an empty label, or one of more than 63 characters
        return False


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process; the shell of sbatch or salloc itself is no task of a step."""
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) >= FIRST_RESERVED_STEP:
        return False
    return bool(environ.get("SLURM_PROCID") and (step or environ["SLURM_PROCID"] != "0"))


class _Variables:
    """Environment variables, and what is wrong with those that were read."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[Problem] = []

    def has(self, name: str) -> bool:
        return bool(self.environ.get(name))

    def first(self, *names: str) -> str:
        """The first of the variables that is set, else the first."""
        return next((name for name in names if self.has(name)), names[0])

    def refuse(self, name: str, rule: str, remedy: str, *, alone: bool = False) -> None:
        """`here`: another machine's variables may be right, and its ranks know nothing of these."""
        self.problems.append(Problem(name, self.environ.get(name), rule, remedy, here=True, alone=alone))

    def number(self, name: str, *, at_least: int = 0, below: int | None = None) -> int | None:
        """The variable's value. None where it is not set, or wrong, which is noted."""
        text = self.environ.get(name, "").strip()
        number = int(text) if re.fullmatch(r"[0-9]{1,19}", text) else -1
        if self.has(name) and not at_least <= number < (below or 10**20):
            rule = f"must be a whole number from {at_least} {'on' if below is None else f'to {below - 1}'}"
            self.refuse(name, rule, "let torchrun or srun set it")
            return None
        return number if self.has(name) else None


def _from_variables(variables: _Variables) -> ProcessEnvironment:
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if not variables.has(name):
            start = "start with `torchrun --nproc-per-node N pretrain_gpt.py`, or set both"
            rule = f"not set, but {other}={variables.environ[other]} is"
            variables.refuse(name, rule, f"{start}; for one process `unset {other}`")
    world_size = variables.number("WORLD_SIZE", at_least=1)
    rank = variables.number("RANK") or 0
    if world_size is not None and rank >= world_size:
        rule, remedy = f"must be below WORLD_SIZE={world_size}", f"0 to {world_size - 1}, each once"
        variables.refuse("RANK", rule, remedy, alone=True)
    for name, example in (("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "a free port there, such as 29500")):
        if world_size != 1 and not variables.has(name):
            variables.refuse(name, "not set, but several processes must find each other", f"{name}={example}")
    address = variables.environ.get("MASTER_ADDR") or "127.0.0.1"
    port = variables.number("MASTER_PORT", at_least=1, below=65536) or 0
    local_size = variables.number("LOCAL_WORLD_SIZE", at_least=1)
    local_rank = variables.number("LOCAL_RANK", below=local_size)
    if world_size == 1 and local_rank is None:
        local_rank = 0
    if local_size is None:  # all ranks share this host where rank 0 is reached by loopback
        on_one_host = address in ("127.0.0.1", "localhost", "::1")
        local_size = (world_size or 1) if on_one_host else (local_rank or 0) + 1
    launcher: Launcher = "torchrun" if variables.has("TORCHELASTIC_RUN_ID") else "env"
    return ProcessEnvironment(rank, world_size or 1, local_rank, local_size, address, port, launcher)


def _from_slurm(variables: _Variables) -> ProcessEnvironment:
    environ = variables.environ
    counted = "SLURM_STEP_NUM_TASKS" if variables.has("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    if not variables.has(counted):
        variables.refuse(counted, "not set, but SLURM_PROCID is", "start with srun --ntasks N, or unset SLURM_PROCID")
        return ProcessEnvironment(launcher="slurm")
    size = variables.number(counted, at_least=1)
    world_size, rank = size or 1, variables.number("SLURM_PROCID", below=size) or 0
    if variables.has("WORLD_SIZE") and environ["WORLD_SIZE"].strip() != environ[counted].strip():
        variables.refuse(
            "WORLD_SIZE", f"differs from {counted}={environ[counted]}", "unset WORLD_SIZE, or set RANK too"
        )
    local_rank = variables.number("SLURM_LOCALID")
    nodes = variables.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    address = environ.get("MASTER_ADDR") or first_host(environ.get(nodes, ""))
    if not address and world_size > 1:
        rule = "is no list of nodes, so that rank 0 cannot be found"
        variables.refuse(nodes, rule, "start with srun, which sets it, or set MASTER_ADDR")
    port = variables.number("MASTER_PORT", at_least=1, below=65536)
    if not variables.has("MASTER_PORT"):  # below the usual ephemeral ports; steps of a job that run side by side differ
        job, step = variables.number("SLURM_JOB_ID") or 0, environ.get("SLURM_STEP_ID", "0")
        port = 12000 + (job * 31 + (int(step) if step.isdigit() else 0)) % 20000
    tasks = variables.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    counts = tasks_per_node(environ.get(tasks, "")) or [world_size if environ.get("SLURM_NNODES", "1") == "1" else 1]
    local_size = counts[min(variables.number("SLURM_NODEID") or 0, len(counts) - 1)]
    return ProcessEnvironment(rank, world_size, local_rank, local_size, address or "127.0.0.1", port or 0, "slurm")

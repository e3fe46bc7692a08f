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
    reader = _Reader(environ)
    if reader.has("RANK") or (reader.has("WORLD_SIZE") and not _in_slurm_step(environ)):
        found = _from_variables(reader)
    elif _in_slurm_step(environ):
        found = _from_slurm(reader)
    else:
        return ProcessEnvironment()
    if found.world_size > 1 and not _can_be_a_host(found.master_addr):
        reader.refuse("MASTER_ADDR", "is not the name or address of a host", "the host of rank 0", alone=True)
    if reader.problems:
        raise UserError(reader.problems)
    return found


def claimed_rank(environ: Mapping[str, str]) -> int:
    """The rank that even a broken environment claims (0 where it claims none): decides who prints a refusal."""
    text = environ.get("RANK") or (environ.get("SLURM_PROCID") if _in_slurm_step(environ) else None) or "0"
    return int(text) if text.isascii() and text.isdigit() else 0


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
    """The first host of a SLURM node list: `gpu-a[03-04,9],n1` -> `gpu-a03`."""
    first = re.match(r"(?:[^\[\],\s]|\[[0-9][0-9,-]*\])+(?=,|$)", nodelist.strip())
    if not first:
        raise ValueError(nodelist)
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0])


def _can_be_a_host(name: str) -> bool:
    """Whether it has the form of one: what a resolver is asked for, it must be able to encode."""
    try:
        return bool(re.fullmatch(r"[\w.:%-]+", name) and name.encode("idna"))
    except UnicodeError:  # an empty label, or one of more than 63 characters
        return False


def tasks_per_node(text: str) -> list[int]:
    """SLURM's counts for each node: `2(x3),1` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if not match:
            raise ValueError(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


class _Reader:
    """Reads variables and collects what is wrong with them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[Problem] = []

    def has(self, name: str) -> bool:
        return bool(self.environ.get(name))

    def first(self, *names: str) -> str:
        """The first of the variables that is set, else an empty text."""
        return next((name for name in names if self.has(name)), "")

    def refuse(self, name: str, rule: str, remedy: str, *, alone: bool = False) -> None:
        """`here`: another machine's variables may be right, and its ranks know nothing of these."""
        self.problems.append(Problem(name, self.environ.get(name), rule, remedy, here=True, alone=alone))

    def integer(self, name: str, *, at_least: int = 0, below: int | None = None) -> int | None:
        """The variable's value. None where it is not set, or wrong, which is noted."""
        if not self.has(name):
            return None
        text = self.environ[name]
        if not re.fullmatch(r"\s*-?[0-9]+\s*", text):
            self.refuse(name, "must be a whole number", f"a number from {at_least} on, as torchrun and srun set it")
        elif int(text) < at_least:
            self.refuse(name, f"must be at least {at_least}", "let torchrun or srun set it")
        elif below is not None and int(text) >= below:
            self.refuse(name, f"must be below {below}", f"{at_least} to {below - 1}")
        else:
            return int(text)
        return None


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process; the shell of sbatch or salloc itself is no task of a step."""
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) >= FIRST_RESERVED_STEP:
        return False
    return bool(environ.get("SLURM_PROCID") and (step or environ["SLURM_PROCID"] != "0"))


def _from_variables(reader: _Reader) -> ProcessEnvironment:
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if not reader.has(name):
            start = "start with `torchrun --nproc-per-node N pretrain_gpt.py`, or set both"
            rule = f"not set, but {other}={reader.environ[other]} is"
            reader.refuse(name, rule, f"{start}; for one process `unset {other}`")
    world_size = reader.integer("WORLD_SIZE", at_least=1)
    rank = reader.integer("RANK") or 0
    if world_size is not None and rank >= world_size:
        reader.refuse("RANK", f"must be below WORLD_SIZE={world_size}", f"0 to {world_size - 1}, each once", alone=True)
    for name, example in (("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "a free port there, such as 29500")):
        if world_size != 1 and not reader.has(name):
            reader.refuse(name, "not set, but several processes must find each other", f"{name}={example}")
    address = reader.environ.get("MASTER_ADDR") or "127.0.0.1"
    port = reader.integer("MASTER_PORT", at_least=1, below=65536) or 0
    local_size = reader.integer("LOCAL_WORLD_SIZE", at_least=1)
    local_rank = reader.integer("LOCAL_RANK", below=local_size)
    if world_size == 1 and local_rank is None:
        local_rank = 0
    if local_size is None:  # all ranks share this host where rank 0 is reached by loopback
        on_one_host = address in ("127.0.0.1", "localhost", "::1")
        local_size = (world_size or 1) if on_one_host else (local_rank or 0) + 1
    launcher: Launcher = "torchrun" if reader.has("TORCHELASTIC_RUN_ID") else "env"
    return ProcessEnvironment(rank, world_size or 1, local_rank, local_size, address, port, launcher)


def _from_slurm(reader: _Reader) -> ProcessEnvironment:
    counted = reader.first("SLURM_STEP_NUM_TASKS") or "SLURM_NTASKS"
    if not reader.has(counted):
        reader.refuse(counted, "not set, but SLURM_PROCID is", "start with srun --ntasks N, or unset SLURM_PROCID")
        return ProcessEnvironment(launcher="slurm")
    size = reader.integer(counted, at_least=1)
    rank = reader.integer("SLURM_PROCID", below=size) or 0
    if reader.has("WORLD_SIZE") and reader.environ["WORLD_SIZE"].strip() != reader.environ[counted].strip():
        rule = f"differs from {counted}={reader.environ[counted]}"
        reader.refuse("WORLD_SIZE", rule, "unset WORLD_SIZE, or set RANK too")
    local_rank, world_size = reader.integer("SLURM_LOCALID"), size or 1
    address, port = _slurm_master(reader, needed=world_size > 1)
    local_size = _slurm_local_world_size(reader, world_size)
    return ProcessEnvironment(rank, world_size, local_rank, local_size, address, port, "slurm")


def _slurm_master(reader: _Reader, *, needed: bool) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT where set, else the step's first host and a port that follows from job and step."""
    address = reader.environ.get("MASTER_ADDR") or ""
    nodes = reader.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if not address and nodes:
        try:
            address = first_host(reader.environ[nodes])
        except ValueError:
            reader.refuse(nodes, "not a list of nodes", "a list like n[0-3,7], or set MASTER_ADDR")
    elif not address and needed:
        rule = "not set, so rank 0 cannot be found"
        reader.refuse("SLURM_STEP_NODELIST", rule, "start with srun, or set MASTER_ADDR")
    address = address or "127.0.0.1"
    if reader.has("MASTER_PORT"):
        return address, reader.integer("MASTER_PORT", at_least=1, below=65536) or 0
    job, step = reader.integer("SLURM_JOB_ID") or 0, reader.environ.get("SLURM_STEP_ID", "0")
    # Below the usual range of ephemeral ports (32768 on); steps of one job that run side by side differ.
    return address, 12000 + (job * 31 + (int(step) if step.isdigit() else 0)) % 20000


def _slurm_local_world_size(reader: _Reader, world_size: int) -> int:
    """Tasks of this step on this host."""
    environ = reader.environ
    name = reader.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    if not name:
        return world_size if environ.get("SLURM_NNODES", "1") == "1" else 1
    try:
        counts = tasks_per_node(environ[name])
    except ValueError:
        reader.refuse(name, "not SLURM's count of tasks for each node", "a text like 4 or 4(x2),3, as srun sets it")
        return 1
    node = int(environ["SLURM_NODEID"]) if environ.get("SLURM_NODEID", "").isdigit() else 0
    return counts[min(node, len(counts) - 1)]

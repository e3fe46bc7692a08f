"""Every launcher's variables are understood, and everything wrong in them is told at once."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.errors.problems import UserError
from megalite.launch import environment as module
from megalite.launch.environment import claimed_rank, launch_command, read_environment
from megalite.launch.process import Launcher, ProcessEnvironment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu-a[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
SBATCH_SHELL = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[0-3]", "SLURM_PROCID": "0"}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


PLAIN = without(TORCHRUN, "TORCHELASTIC_RUN_ID", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, ProcessEnvironment()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ProcessEnvironment(local_rank=None, launcher="env")),
        (TORCHRUN, ProcessEnvironment(5, 8, 1, 4, "node0", 29400, "torchrun")),
        (PLAIN, ProcessEnvironment(5, 8, None, 1, "node0", 29400, "env")),
        (PLAIN | {"MASTER_ADDR": "localhost"}, ProcessEnvironment(5, 8, None, 8, "localhost", 29400, "env")),
        (SRUN, ProcessEnvironment(3, 4, 1, 2, "gpu-a03", 12000 + 4711 * 31 % 20000, "slurm")),
        # What is set wins over SLURM.
        (SRUN | TORCHRUN, ProcessEnvironment(5, 8, 1, 4, "node0", 29400, "torchrun")),
        (
            SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"},
            ProcessEnvironment(3, 4, 1, 2, "10.0.0.1", 1234, "slurm"),
        ),
        (SRUN | {"WORLD_SIZE": "4", "MASTER_PORT": "1"}, ProcessEnvironment(3, 4, 1, 2, "gpu-a03", 1, "slurm")),
        # The shell of sbatch and salloc is a single process.
        (SBATCH_SHELL, ProcessEnvironment()),
        (SBATCH_SHELL | {"SLURM_STEP_ID": "4294967291"}, ProcessEnvironment()),
        (SBATCH_SHELL | {"MASTER_ADDR": "n0", "MASTER_PORT": "1"}, ProcessEnvironment()),
    ],
)
def test_every_launcher_s_variables_are_understood(variables: dict[str, str], found: ProcessEnvironment) -> None:
    assert replace(read_environment(variables), threads=None) == found


def test_ranks_of_a_step_agree_on_the_port_and_other_steps_and_jobs_have_another() -> None:
    ports = [
        read_environment({**SRUN, **change}).master_port
        for change in ({}, {"SLURM_PROCID": "0"}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "4712"})
    ]
    assert ports[0] == ports[1]
    assert len({*ports}) == 3


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n7", "n7"),
        ("n[0-3,7]", "n0"),
        ("n[7,0-3]", "n7"),
        ("gpu-a[01-04]", "gpu-a01"),
        ("gpu-a[03-04,9],login1", "gpu-a03"),
        ("login1,gpu-a[03-04]", "login1"),
        ("n[001-128].cluster.org", "n001.cluster.org"),
        ("rack[1-2]node[05-08]", "rack1node05"),
        ("10.0.0.1,10.0.0.2", "10.0.0.1"),
    ],
)
def test_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert read_environment(SRUN | {"SLURM_STEP_NODELIST": nodelist}).master_addr == host


@pytest.mark.parametrize(("text", "node", "count"), [("4", 0, 4), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("1,2", 1, 2)])
def test_ranks_of_a_node(text: str, node: int, count: int) -> None:
    step = {"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
    assert read_environment({**SRUN, **step}).local_world_size == count


OF_ONE_NODE = without(TORCHRUN, "TORCHELASTIC_RUN_ID") | {"LOCAL_WORLD_SIZE": "8"}
TASK = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1,8", "SLURM_STEP_NUM_TASKS": "9"}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("cores", "variables", "of_torchrun", "threads"),
    [
        (16, {}, {}, 16),
        (32, OF_ONE_NODE, {}, 4),
        (4, OF_ONE_NODE, {}, 1),
        (4, TASK | {"SLURM_CPUS_PER_TASK": "4"}, {}, 4),  # bound: it sees only its own
        (64, TASK | {"SLURM_CPUS_PER_TASK": "4"}, {}, 4),
        (64, TASK, {}, 8),
        (64, TASK | {"SLURM_CPUS_ON_NODE": "16"}, {}, 2),  # all that the step was given here
        (64, ONE_THREAD, {}, None),
        (64, TORCHRUN | ONE_THREAD, ONE_THREAD, None),
        (64, TORCHRUN | ONE_THREAD, {}, 16),  # torchrun itself has set it
    ],
)
def test_ranks_of_a_node_share_its_cores_unless_the_user_has_decided(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    variables: dict[str, str],
    of_torchrun: dict[str, str],
    threads: int | None,
) -> None:
    torchrun = subprocess.Popen(["sleep", "60"], env=of_torchrun)
    while not Path(f"/proc/{torchrun.pid}/cmdline").read_bytes().startswith(b"sleep"):
        time.sleep(0.01)  # exec shows the new program's arguments and environment a moment after it closes pipes
    monkeypatch.setattr(os, "getppid", lambda: torchrun.pid)
    monkeypatch.setattr(module, "usable_cores", lambda: cores)
    try:
        assert read_environment(variables).threads == threads
    finally:
        torchrun.kill()
        torchrun.wait()


BAD = [
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ["RANK"]),
    ({"RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ["WORLD_SIZE"]),
    ({"WORLD_SIZE": "2"}, ["RANK", "MASTER_PORT", "MASTER_ADDR"]),
    ({**TORCHRUN, "RANK": "8"}, ["RANK"]),
    ({**TORCHRUN, "RANK": "five", "WORLD_SIZE": "2.5"}, ["WORLD_SIZE", "RANK"]),
    ({**TORCHRUN, "WORLD_SIZE": "0"}, ["WORLD_SIZE"]),
    ({**TORCHRUN, "LOCAL_RANK": "4"}, ["LOCAL_RANK"]),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "none"}, ["LOCAL_WORLD_SIZE"]),
    ({**TORCHRUN, "RANK": "-1", "MASTER_PORT": "65536", "LOCAL_RANK": "z"}, ["RANK", "MASTER_PORT", "LOCAL_RANK"]),
    (without(SRUN, "SLURM_STEP_NUM_TASKS"), ["SLURM_STEP_NUM_TASKS"]),
    ({**SRUN, "SLURM_PROCID": "4"}, ["SLURM_PROCID"]),
    ({**SRUN, "SLURM_STEP_NUM_TASKS": "many", "SLURM_LOCALID": "x"}, ["SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]),
    ({**SRUN, "SLURM_STEP_NODELIST": "["}, ["SLURM_STEP_NODELIST"]),
    ({**SRUN, "WORLD_SIZE": "8"}, ["WORLD_SIZE"]),  # exported for srun, which starts 4
    ({**TORCHRUN, "RANK": "9" * 5000}, ["RANK"]),
    ({**SRUN, "SLURM_CPUS_PER_TASK": "4(x2)"}, ["SLURM_CPUS_PER_TASK"]),
    ({**SRUN, "SLURM_CPUS_PER_TASK": "0", "SLURM_CPUS_ON_NODE": "all"}, ["SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"]),
    ({"MEGALITE_JOB_BEGAN": "today"}, ["MEGALITE_JOB_BEGAN"]),
    ({**TORCHRUN, "RANK": "8", "MEGALITE_JOB_BEGAN": "-1"}, ["MEGALITE_JOB_BEGAN", "RANK"]),
]


@pytest.mark.parametrize(("variables", "names"), BAD, ids=[" ".join(names) for _, names in BAD])
def test_everything_wrong_is_told_at_once(variables: dict[str, str], names: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read_environment(variables)
    assert [problem.setting for problem in caught.value.problems] == names
    assert all(problem.rule and problem.hint for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("variables", "rank"), [({}, 0), ({"RANK": "3"}, 3), ({"RANK": "x"}, 0), (SRUN, 3), (SBATCH_SHELL, 0)]
)
def test_the_claimed_rank_needs_no_right_environment(variables: dict[str, str], rank: int) -> None:
    assert claimed_rank(variables) == rank


@pytest.mark.parametrize(
    ("place", "start"),
    [
        ((1, 1, "single"), "python"),
        ((4, 4, "torchrun"), "torchrun --standalone --nproc-per-node 4"),
        ((8, 4, "torchrun"), "torchrun --nproc-per-node 4"),
        ((8, 1, "slurm"), "srun --ntasks 8 python"),
    ],
)
def test_a_job_is_told_how_it_is_started_again(place: tuple[int, int, Launcher], start: str) -> None:
    size, local, launcher = place
    environment = ProcessEnvironment(world_size=size, local_world_size=local, launcher=launcher)
    assert launch_command(environment, ["pretrain_gpt.py", "a b=1"]) == f"{start} pretrain_gpt.py 'a b=1'"

"""What the batch scripts decide; small scripts in place of SLURM's commands write down how they were called."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

JOB = Path(__file__).parents[2] / "scripts" / "slurm" / "job.sh"
COMMANDS = {
    "scancel": 'echo "scancel $*" >> calls; kill -USR1 "$(cat ranks.pid)"',
    "scontrol": """case $* in
        show\\ hostnames*) printf 'n0\\nn1\\n' ;;
        show\\ job\\ --oneliner\\ 7 | show\\ job\\ --oneliner\\ 7_2)
            echo "JobId=7 JobState=$JOB_STATE Reason=None TimeLimit=0-00:10:00 PreemptTime=${PREEMPTED-None}" \\
                "Command=$PWD/my job.sh $ARGUMENTS WorkDir=$PWD" ;;
        *) echo "scontrol $*" >> calls ;;
    esac""",
    # As torchrun: writes what became of the run, when it is asked to stop or after a while, and fails.
    "ranks": """echo $$ > ranks.pid
        told() {
            [ -z "$RUN_STATE" ] || printf '{"state": "%s", "step": 3%s}' "$RUN_STATE" "$MORE" > logs/7.status
            exit "$CODE"
        }
        trap told USR1
        echo "$*" > arguments; echo "$MEGALITE_COMMAND" > command
        for i in $(seq 20); do sleep 0.05; [ "$ASKED" ] || told; done""",
    # The preflight: warns the job while it measures, if asked to.
    "srun": """echo "srun $*" >> calls
        env > variables
        [ -z "$WARNS" ] || kill -USR1 $JOB_SHELL
        printf "$CHOSEN"; exit $SRUN_CODE""",
}

SHELL = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NNODES": "2", "JOB_STATE": "RUNNING", "CODE": "1"}
SHELL |= {"RUN_STATE": "", "MORE": "", "WARNS": "", "SRUN_CODE": "0", "CHOSEN": ""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "pretrain_gpt.py").touch()
    for name, text in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(folder: Path, *arguments: str, signals: tuple[signal.Signals, ...] = (), **variables: str) -> tuple[int, str]:
    """The status of a job's script, and the calls of SLURM's commands that change something."""
    told = 'echo "$MASTER_ADDR $port" > meeting; echo "${srun_options[@]}" > options'
    script = f'export JOB_SHELL=$$; . {JOB}; {told}; train ranks "${{arguments[@]}}"'
    environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", **SHELL, "ASKED": "yes" if signals else ""}
    environment |= {"ARGUMENTS": " ".join(arguments), **variables}
    shell = subprocess.Popen(["bash", "-euo", "pipefail", "-c", script, "job", *arguments], cwd=folder, env=environment)
    if signals:
        while not (folder / "arguments").exists():
            time.sleep(0.01)
        for number in signals:
            shell.send_signal(number)
            time.sleep(0.05)
    status = shell.wait(20)
    return status, (folder / "calls").read_text() if (folder / "calls").exists() else ""


ARRAY = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}  # of its tasks the one with the array's own number


@pytest.mark.parametrize(("job", "variables"), [("7", {}), ("7_2", ARRAY)])
def test_a_warning_reaches_the_ranks_and_a_stopped_run_is_requeued(
    folder: Path, job: str, variables: dict[str, str]
) -> None:
    status, calls = run(folder, signals=(signal.SIGUSR1,), RUN_STATE="stopped", **variables)
    assert (status, calls) == (0, f"scancel --signal=USR1 {job}\nscontrol requeue {job}\n")


@pytest.mark.parametrize(
    ("variables", "warned", "requeued"),
    [
        ({"RUN_STATE": "stopped"}, False, True),  # train.max_minutes, or a signal that SLURM sent to the ranks alone
        ({"RUN_STATE": "stopped", "JOB_STATE": "COMPLETING"}, False, False),  # cancelled
        ({"RUN_STATE": "running"}, True, True),  # killed before it had saved
        ({}, True, True),  # warned before it trained
        ({"RUN_STATE": "running"}, False, False),  # a rank has died
        ({}, False, False),  # refused
        ({"RUN_STATE": "failed"}, True, False),
        ({"CODE": "143"}, False, True),  # the ranks alone were told of the end
        ({"CODE": "138"}, False, True),
        ({"CODE": "1", "PREEMPTED": "2026-11-26T02:34:51"}, False, True),
    ],
)
def test_what_is_requeued(folder: Path, variables: dict[str, str], warned: bool, requeued: bool) -> None:
    status, calls = run(folder, signals=(signal.SIGUSR1,) if warned else (), **variables)
    assert ("scontrol requeue 7" in calls) == requeued
    assert status == int(not requeued)


GAINED, VAIN = '"gained": 2, "start_up_s": 40.5, "step_s": 30.25', '"gained": 0, "start_up_s": 41.5, "step_s": null'


@pytest.mark.parametrize(
    ("state", "told", "comes_again"),
    [
        ("", ["", ""], [True, False]),  # warned before training began
        ("running", [VAIN, VAIN], [True, False]),  # killed in the first step, or in its save
        ("stopped", [GAINED, VAIN, GAINED, VAIN, VAIN], [True, True, True, True, False]),
        ("running", [GAINED, GAINED, GAINED], [True, True, True]),
    ],
)
def test_the_second_start_in_a_row_that_gains_no_step_is_the_last(
    folder: Path, state: str, told: list[str], comes_again: list[bool], capfd: pytest.CaptureFixture[str]
) -> None:
    for more, again in zip(told, comes_again, strict=True):
        (folder / "calls").unlink(missing_ok=True)
        (folder / "arguments").unlink(missing_ok=True)
        status, calls = run(folder, signals=(signal.SIGUSR1,), RUN_STATE=state, MORE=f", {more}" if more else "")
        assert (status, "requeue" in calls) == ((0, True) if again else (1, False))
    said = capfd.readouterr().err
    assert ("gained no step: the job fails" in said) == (not comes_again[-1])
    if told == [GAINED, VAIN, GAINED, VAIN, VAIN]:
        # 41 + 2 * 30 + 2 s are needed; the warning came about 600 s before the end, and may come 60 s early: 763 s.
        assert "    start-up took 41.5 s, a step 30.25 s\n" in said
        assert "    --time=13 leaves room for both\n    so does --signal=B:USR1@437," in said


def test_the_log_tells_the_line_that_submits_the_job_again(folder: Path) -> None:
    (folder / "points").write_text("seed=1\nseed=2\n")
    wanted = {"POINTS": "points", "SRUN_OPTIONS": "--mpi none", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_NODE": "8"}
    words = ["model=gpt2", "run_dir='/it is/$HOME'"]
    run(folder, *words, RUN_STATE="finished", **ARRAY, **wanted)
    line = shlex.split((folder / "command").read_text())
    assert line[:3] == ["env", "POINTS=points", "SRUN_OPTIONS=--mpi none"]
    options = ["--nodes=2", "--gpus-per-node=8", "--time=0-00:10:00", "--array=2"]
    assert line[3:] == ["sbatch", *options, "my job.sh", *words]


def test_a_finished_run_is_a_success_whatever_torchrun_returns_and_a_third_vain_start_none(folder: Path) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "7.status").write_text('{"state": "stopped", "step": 3}\n')  # by the start before
    assert run(folder, RUN_STATE="finished") == (0, "")
    (folder / "arguments").unlink()
    assert run(folder, RUN_STATE="") == (1, "")
    (folder / "arguments").unlink()
    (folder / "logs" / "7.starts").write_text("\n\n")  # killed twice without a step
    assert run(folder, RUN_STATE="finished") == (1, "")
    assert not (folder / "arguments").exists()


def test_arguments_of_the_job_and_of_the_line_of_an_array_s_task(folder: Path) -> None:
    (folder / "points").write_text("seed=1\nseed=2 'run_name=a b'\n")
    run(folder, "train.steps=3", RUN_STATE="finished", POINTS="points", **ARRAY)
    told = (folder / "arguments").read_text()
    assert told == f"train.steps=3 launch.status_file='{folder}/logs/7.status' seed=2 run_name=a b\n"
    assert (folder / "meeting").read_text() == f"n0 {12000 + 7 * 31}\n"


@pytest.mark.parametrize("line", ["", "  ", "run_name='a"])
def test_a_line_without_arguments_is_refused(folder: Path, line: str) -> None:
    (folder / "points").write_text(f"seed=1\n{line}\nseed=3\n")
    assert run(folder, RUN_STATE="finished", POINTS="points", **ARRAY) == (2, "")
    assert not (folder / "arguments").exists()


def look(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """A job that trains on the best of its two nodes."""
    options = {"SRUN_OPTIONS": "--mpi none", "RUN_IN": "apptainer exec it.sif"}
    return run(folder, *arguments, TRAIN_NODES="1", RUN_STATE="finished", **options, **variables)


@pytest.mark.parametrize(("code", "tasks"), [("0", {}), ("1", {"SLURM_NTASKS": "8"})])
def test_the_preflight_looks_where_training_will_run(folder: Path, code: str, tasks: dict[str, str]) -> None:
    status, calls = look(folder, "run_dir='/x y/runs/a'", CHOSEN="words\nn1\n", SRUN_CODE=code, **tasks)
    place = "--wait 180 --overcommit --ntasks 2 --ntasks-per-node 1 --mpi none apptainer exec it.sif"
    assert (status, calls) == (0, f"srun {place} python -m megalite preflight --folder /x y/runs --keep 1\n")
    assert (folder / "meeting").read_text().startswith("n1 ")
    each = 4 if tasks else 1
    assert (folder / "options").read_text() == f"--mpi none --nodes 1 --ntasks {each} --nodelist n1\n"


@pytest.mark.parametrize(
    ("variables", "status", "requeued"),
    [
        ({"SRUN_CODE": "2", "CHOSEN": "n0\n"}, 2, False),
        ({"SRUN_CODE": "137", "CHOSEN": "n0\n"}, 2, False),
        ({"SRUN_CODE": "1"}, 2, False),
        ({"WARNS": "yes", "SRUN_CODE": "138"}, 0, True),
        ({"WARNS": "yes", "SRUN_CODE": "138", "JOB_STATE": "COMPLETING"}, 1, False),
    ],
)
def test_a_preflight_that_fails_ends_the_job_and_one_that_is_warned_comes_again(
    folder: Path, variables: dict[str, str], status: int, requeued: bool
) -> None:
    found, calls = look(folder, **variables)
    assert (found, "scontrol requeue 7" in calls) == (status, requeued)
    assert not (folder / "arguments").exists()


def test_rounds_of_torchrun_s_rendezvous_share_no_store(folder: Path) -> None:
    (folder / "scripts").symlink_to(JOB.parents[1])
    variables = {"PATH": f"{folder}/bin:{os.environ['PATH']}", **SHELL, "SRUN_CODE": "1"}
    done = subprocess.run(["bash", "scripts/slurm/pretrain.sbatch"], cwd=folder, env=variables, check=False)
    assert done.returncode == 1
    assert "--rdzv-backend c10d --rdzv-id 7 --rdzv-endpoint n0:12217" in (folder / "calls").read_text()
    assert "\nTORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in (folder / "variables").read_text()

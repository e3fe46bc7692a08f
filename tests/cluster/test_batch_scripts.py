"""What the batch scripts decide; small scripts in place of SLURM's commands write down how they were called."""

import os
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
        show\\ job*) echo "JobId=7 JobState=$JOB_STATE Reason=None" ;;
        *) echo "scontrol $*" >> calls ;;
    esac""",
    # As torchrun: writes what became of the run, when it is asked to stop or after a while, and fails.
    "ranks": """echo $$ > ranks.pid
        told() {
            [ -z "$RUN_STATE" ] || printf '{"state": "%s", "step": 3}' "$RUN_STATE" > logs/7.status
            exit "$CODE"
        }
        trap told USR1
        echo "$*" > arguments
        for i in $(seq 20); do sleep 0.05; [ "$ASKED" ] || told; done""",
}


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
    script = f'. {JOB}; echo "$MASTER_ADDR $port" > meeting; train ranks "${{arguments[@]}}"'
    environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]"}
    environment |= {
        "JOB_STATE": "RUNNING",
        "ASKED": "yes" if signals else "",
        "CODE": "1",
        "RUN_STATE": "",
        **variables,
    }
    shell = subprocess.Popen(["bash", "-euo", "pipefail", "-c", script, "job", *arguments], cwd=folder, env=environment)
    if signals:
        while not (folder / "arguments").exists():
            time.sleep(0.01)
        for number in signals:
            shell.send_signal(number)
            time.sleep(0.05)
    status = shell.wait(20)
    return status, (folder / "calls").read_text() if (folder / "calls").exists() else ""


def test_a_warning_reaches_the_ranks_and_a_stopped_run_is_requeued(folder: Path) -> None:
    status, calls = run(folder, signals=(signal.SIGUSR1,), RUN_STATE="stopped")
    assert (status, calls) == (0, "scancel --signal=USR1 7\nscontrol requeue 7\n")


@pytest.mark.parametrize(
    ("run_state", "job_state", "warned", "requeued"),
    [
        ("stopped", "RUNNING", False, True),  # train.max_minutes, or a signal that SLURM sent to the ranks alone
        ("stopped", "COMPLETING", False, False),  # cancelled
        ("running", "RUNNING", True, True),  # killed before it had saved
        ("", "RUNNING", True, True),  # warned before it trained
        ("running", "RUNNING", False, False),  # a rank has died
        ("", "RUNNING", False, False),  # refused
        ("failed", "RUNNING", True, False),
    ],
)
def test_what_is_requeued(folder: Path, run_state: str, job_state: str, warned: bool, requeued: bool) -> None:
    signals = (signal.SIGUSR1,) if warned else ()
    status, calls = run(folder, signals=signals, RUN_STATE=run_state, JOB_STATE=job_state)
    assert ("scontrol requeue 7" in calls) == requeued
    assert requeued or status == 1


def test_a_finished_run_is_a_success_whatever_torchrun_returns(folder: Path) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "7.status").write_text('{"state": "stopped", "step": 3}\n')  # by the start before
    assert run(folder, RUN_STATE="finished") == (0, "")
    (folder / "arguments").unlink()
    assert run(folder, RUN_STATE="") == (1, "")


def test_arguments_of_the_job_and_of_the_line_of_an_array_s_task(folder: Path) -> None:
    (folder / "points").write_text("seed=1\nseed=2 'run_name=a b'\n")
    run(folder, "train.steps=3", RUN_STATE="finished", POINTS="points", SLURM_ARRAY_TASK_ID="2")
    told = (folder / "arguments").read_text()
    assert told == f"train.steps=3 launch.status_file={folder}/logs/7.status seed=2 run_name=a b\n"
    assert (folder / "meeting").read_text() == f"n0 {12000 + 7 * 31}\n"

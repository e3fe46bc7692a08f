"""The program starts under any launcher with the same result, and ends in order whoever is asked to end it."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from megalite.config.compose import load_config
from megalite.config.schema import Config
from megalite.launch import watchdog
from megalite.launch.context import ParallelContext
from megalite.train import run as run_module
from megalite.train.build import needs_of
from tests.ranks import run_ranks
from tests.train import runs
from tests.train.runs import ROOT, finish, metrics, overrides, train_on_rank, wait_for_step

launch = partial(runs.launch, python=sys.executable)  # as a user does
LONG = ("train.steps=100000", "train.eval_interval=0", "checkpoint.interval=0")


def launch_by_variables(
    arguments: list[str], world_size: int, python: str | None = None
) -> "list[subprocess.Popen[str]]":
    """Ranks that know no more than RANK, WORLD_SIZE and where to meet. They are warm, unless `python` is another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    variables = [{"RANK": str(rank), **rendezvous} for rank in range(world_size)]
    return [runs.launch(arguments, variables=each, python=python) for each in variables]


def saved_at_its_end(run: Path) -> bool:
    return (run / "checkpoints" / f"step-{metrics(run)[-1]['step']:08d}").is_dir()


def processes_of(run: Path) -> list[int]:
    """Whoever has this run folder on its command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"run_dir={run}".encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def wait_for_the_end(run: Path, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while processes_of(run):
        assert time.monotonic() < deadline, f"still there after {timeout} s: {processes_of(run)}"
        time.sleep(0.02)


def test_ranks_by_plain_variables_compute_what_one_process_computes(folder: Path) -> None:
    exact = ("precision=fp64", "model.dropout=0", "train.steps=6", "train.eval_interval=3")
    assert runs.train_on_rank(ParallelContext(), load_config(overrides(folder, "one", *exact), 1)) == 0
    ranks = launch_by_variables(overrides(folder, "two", *exact), 2)
    outputs = [finish(rank) for rank in ranks]
    assert [status for status, _ in outputs] == [0, 0], outputs
    noise = r"^\[W.*hostname of the client socket cannot be retrieved.*\n"  # torch's own, where no names are resolved
    assert re.sub(noise, "", outputs[1][1], flags=re.MULTILINE) == "", "only rank 0 speaks"
    one, two = metrics(folder / "one"), metrics(folder / "two")
    assert len(one) == 8
    for expected, found in zip(one, two, strict=True):
        assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.skipif(sys.platform != "linux", reason="starts a session on a terminal with setsid")
@pytest.mark.parametrize("by", ["SIGINT", "SIGHUP"])
def test_ctrl_c_in_a_terminal_or_its_end_leaves_a_run_that_is_saved(folder: Path, by: str) -> None:
    run, shown, asked, deadline = folder / by, b"", False, time.monotonic() + 120
    ours, theirs = os.openpty()
    command = [
        "setsid",
        "--ctty",
        "--wait",
        sys.executable,
        str(ROOT / "pretrain_gpt.py"),
        *overrides(folder, by, *LONG),
    ]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT)
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline
            if not asked and any(record["step"] >= 3 for record in metrics(run)):
                asked = True
                os.write(ours, b"\x03") if by == "SIGINT" else os.close(ours)
            if by == "SIGINT" or not asked:
                with contextlib.suppress(OSError):  # nothing is there, or nobody any more
                    shown += os.read(ours, 65536)
            time.sleep(0.005)
    finally:
        for pid in processes_of(run):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0, shown
    assert b"\x1b" not in shown, "nothing steers the terminal"
    assert f'"by": "{by}"' in (run / "events.jsonl").read_text()
    assert saved_at_its_end(run)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_signal_to_one_rank_ends_all_saved(folder: Path, tp: int) -> None:
    run = folder / f"one-rank-{tp}"
    ranks = launch_by_variables(overrides(folder, run.name, f"parallel.tp={tp}", *LONG), 2)
    wait_for_step(ranks[0], run, 3)
    ranks[1].send_signal(signal.SIGUSR1)
    outputs = [finish(rank) for rank in ranks]
    assert [status for status, _ in outputs] == [0, 0], outputs
    assert "stopped by a signal to another rank" in outputs[0][1]
    assert saved_at_its_end(run)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_the_ranks_of_a_killed_torchrun_save_and_end(folder: Path) -> None:
    run = folder / "no-torchrun"
    process = launch(overrides(folder, "no-torchrun", *LONG), ranks=2)
    wait_for_step(process, run, 3)
    process.kill()
    wait_for_the_end(run)
    output, _ = process.communicate()
    assert saved_at_its_end(run), output


def _stopped_in_start_up(context: ParallelContext, config: Config) -> int:
    """Rank 1 stands still before there is a run."""
    watchdog.REPORT_S, watchdog.ROLL_S = 6.0, 1.0
    if context.rank == 1:
        run_module.open_training_data = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment]
    return train_on_rank(context, config)


def test_a_rank_that_stands_still_in_start_up_ends_the_job(folder: Path) -> None:
    config = load_config([*overrides(folder, "start-up"), "parallel.startup_timeout_s=3"], 2)
    with pytest.raises(TimeoutError, match=r"^no answer from rank\(s\) 1\n"):  # rank 0 has ended by itself
        run_ranks(_stopped_in_start_up, 2, config, needs=needs_of(config), may_die=[0], timeout=16)


def test_waiting_threads_sleep_on_a_busy_machine(tmp_path: Path) -> None:
    """Seen by what is imported as torch: its OpenMP reads the environment when it is loaded, never again."""
    (tmp_path / "torch").mkdir()
    show = "import os, sys; print(os.environ.get('GOMP_SPINCOUNT')); sys.exit()"
    (tmp_path / "torch" / "__init__.py").write_text(show)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), f"run_dir={tmp_path / 'run'}"]
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        environment["PYTHONPATH"] = str(tmp_path)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert done.stdout == "2000\n", done.stderr


def test_ranks_whose_torchrun_is_killed_while_they_start_wait_for_nobody(folder: Path) -> None:
    """They would look for their store until parallel.startup_timeout_s, 20 minutes by default."""
    process = launch(overrides(folder, "never"), ranks=2)
    deadline = time.monotonic() + 60
    while len(started := ranks_of(process)) < 2 or not all(map(imports_torch, started)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    while any(Path(f"/proc/{rank}").exists() for rank in started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [rank for rank in started if Path(f"/proc/{rank}").exists()]


def ranks_of(process: "subprocess.Popen[str]") -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def imports_torch(rank: str) -> bool:
    return "libtorch" in Path(f"/proc/{rank}/maps").read_text()

"""A pipeline that loses a rank ends with its name, and the next start goes on as if nothing had happened.

Real processes. Between its neighbours' sends and receives a rank has nobody but them to hear from.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.train.runs import finish, kill, launch, metrics, overrides, state_bytes, wait_for_step, write_text
from tests.train.test_launch import launch_by_variables

TIMEOUT_S = 4
STEPS = 16
CAUSE = "ends because of: no word from rank 1: it was killed, is stopped, or hangs"
PIPELINE = ("train.steps=16", "train.check_replicas_every=0", f"parallel.timeout_s={TIMEOUT_S}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lost")
    write_text(folder / "text.txt")
    return folder


def arguments(folder: Path, run: str, pp: int, *extra: str) -> list[str]:
    return overrides(folder, run, *PIPELINE, f"parallel.pp={pp}", f"model.num_layers={pp}", *extra)


@pytest.mark.parametrize(("pp", "schedule"), [(2, "1f1b"), pytest.param(3, "zb-h1", marks=pytest.mark.long)])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_the_others_end_in_time_and_name_it(folder: Path, pp: int, schedule: str, how: signal.Signals) -> None:
    run = folder / f"{schedule}-{how.name}"
    endless = arguments(folder, run.name, pp, f"parallel.schedule={schedule}", "train.steps=9999")
    ranks = launch_by_variables(endless, pp)
    try:
        wait_for_step(ranks[0], run, 3)
        ranks[1].send_signal(how)
        begin = time.monotonic()
        outputs = [finish(rank, timeout=60) for rank in ranks if rank is not ranks[1]]
    finally:
        for rank in (rank for rank in ranks if rank.poll() is None):
            kill(rank)
    assert time.monotonic() - begin < TIMEOUT_S + 20, "its patience, some words to each other, the interpreter's end"
    assert all(status not in (0, 2) for status, _ in outputs)
    assert all(CAUSE in output for _, output in outputs), outputs


def test_a_restart_ends_where_the_uninterrupted_run_ends(folder: Path) -> None:
    """Bit for bit, dropout and evaluation included."""
    whole, broken = folder / "whole", folder / "broken"
    status, output = finish(launch(arguments(folder, "whole", 2), ranks=2))
    assert status == 0, output
    process = launch(arguments(folder, "broken", 2), ranks=2, python=sys.executable)  # whose children are the ranks
    wait_for_step(process, broken, 8)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    status, output = finish(process)
    assert status != 0
    assert metrics(broken)[-1]["step"] < STEPS
    status, output = finish(launch(arguments(folder, "broken", 2), ranks=2))
    assert status == 0, output
    assert metrics(broken) == metrics(whole)
    assert state_bytes(broken, STEPS) == state_bytes(whole, STEPS)

"""A pipeline that loses a rank ends with its name (that it goes on: tests/train/test_resume.py).

Real processes. Between its neighbours' sends and receives a rank has nobody but them to hear from.
"""

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.train.runs import finish, kill, overrides, wait_for_step, write_text
from tests.train.test_launch import launch_by_variables

TIMEOUT_S = 4
CAUSE = {
    signal.SIGKILL: "ends because of: no word from rank 1: killed, stopped or hanging",
    signal.SIGSTOP: f"no progress within parallel.timeout_s ({TIMEOUT_S} s); no answer from rank 1 on",
}
PIPELINE = ("train.steps=9999", "train.check_replicas_every=0", f"parallel.timeout_s={TIMEOUT_S}")
STAGES = ("parallel.pp=3", "model.num_layers=3", "parallel.schedule=zb-h1")


# Of two stages one is killed by tests/train/test_resume.py, too.
@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_the_others_end_in_time_and_name_it(tmp_path: Path, how: signal.Signals) -> None:
    write_text(tmp_path / "text.txt")
    ranks = launch_by_variables(overrides(tmp_path, "run", *PIPELINE, *STAGES), 3, sys.executable)
    try:
        wait_for_step(ranks[0], tmp_path / "run", 3)
        ranks[1].send_signal(how)
        begin = time.monotonic()
        outputs = [finish(rank, timeout=60) for rank in ranks if rank is not ranks[1]]
    finally:
        for rank in (rank for rank in ranks if rank.poll() is None):
            kill(rank)
    assert time.monotonic() - begin < TIMEOUT_S + 20, "its patience, some words to each other, the interpreter's end"
    assert all(status not in (0, 2) for status, _ in outputs)
    told = [CAUSE[how] in output for _, output in outputs]
    assert any(told) if how == signal.SIGSTOP else all(told), outputs  # the report of a hang is one rank's

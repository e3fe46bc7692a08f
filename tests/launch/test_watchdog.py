"""Ranks that make no progress end, with a report of where each stands. Ranks that do, or wait for a disk, go on."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.launch import watchdog
from megalite.launch.context import ParallelContext
from megalite.launch.watchdog import Watchdog, summary
from tests.ranks import run_ranks

PATIENCE_S = 0.6
Doing = Callable[[], tuple[object, str] | None]


def waits_for_a_lock_that_nobody_frees() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _hang(context: ParallelContext, folder: Path, holds_lock: bool) -> None:
    """Rank 1 hangs without a collective; the others wait for it in one."""
    watchdog.REPORT_S = 3.0
    with Watchdog(context, lambda: (7, f"step 7 of rank {context.rank}"), lambda: PATIENCE_S, folder, ["here"] * 3):
        if context.rank == 1 and holds_lock:
            pattern = "a" * 40
            __import__("re").match("(a+)+$", pattern + "b")  # for ever, without a look at who else wants to run
        if context.rank == 1:
            waits_for_a_lock_that_nobody_frees()
        try:
            dist.all_reduce(torch.ones(1), group=context.group("dp-cp"))
        except RuntimeError:  # another one has ended a moment earlier
            time.sleep(5)


def report(folder: Path) -> dict[str, Any]:
    """The only one."""
    [path] = folder.glob("hang-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_every_rank_says_where_it_stands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert run_ranks(_hang, 3, tmp_path, False, may_die=[0, 1, 2], timeout=30) == [None] * 3
    assert time.monotonic() - began < 15
    found = report(tmp_path)
    assert found["finding"] == "all ranks answer"
    assert {rank: word["doing"] for rank, word in found["ranks"].items()} == {
        rank: f"step 7 of rank {rank}" for rank in "012"
    }
    assert "waits_for_a_lock_that_nobody_frees" in found["ranks"]["1"]["stacks"]["main"][-1]
    assert "all_reduce" in " ".join(found["ranks"]["0"]["stacks"]["main"])


def test_a_rank_that_cannot_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="1"):  # rank 1 is killed by the time-out of the test
        run_ranks(_hang, 3, tmp_path, True, may_die=[0, 2], timeout=6)
    found = report(tmp_path)
    assert found["finding"].startswith("no answer from rank 1 on here: stopped")
    assert sorted(found["ranks"]) == ["0", "2"]


def _stopped_in_a_save(context: ParallelContext, folder: Path) -> None:
    """Rank 1 cannot answer, and the others wait for the disk that it writes to."""
    watchdog.REPORT_S = 3.0
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with Watchdog(context, lambda: None, lambda: PATIENCE_S, folder, ["here"] * 3):
        time.sleep(30)


def test_a_rank_that_is_stopped_in_a_save_is_no_slow_disk(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):  # the stopped one is killed by the time-out of the test
        run_ranks(_stopped_in_a_save, 2, tmp_path, may_die=[0], timeout=6)
    assert report(tmp_path)["finding"].startswith("no answer from rank 1 on here: stopped")


def _go_on(context: ParallelContext, folder: Path, waits: bool) -> str:
    at = [0]

    def doing() -> tuple[object, str] | None:
        return None if waits else (at[0], "")

    with Watchdog(context, doing, lambda: PATIENCE_S, folder, ["here"] * 3):
        for _ in range(30):
            time.sleep(PATIENCE_S / 10)
            at[0] += 1
    time.sleep(2 * PATIENCE_S)  # it watches no longer
    return "alive"


@pytest.mark.parametrize("waits", [False, True])
def test_who_goes_on_or_waits_for_a_disk_is_left_alone(tmp_path: Path, waits: bool) -> None:
    assert run_ranks(_go_on, 2, tmp_path, waits) == ["alive"] * 2
    assert not [*tmp_path.iterdir()]


def test_ranks_that_do_the_same_share_a_line_and_others_come_first() -> None:
    def word(doing: str, place: str, collective: str = "") -> dict[str, Any]:
        stacks = {"main": ["/usr/lib/x.py:1 main", f"megalite/{place}"]}
        return {"host": "n0", "pid": 5, "doing": doing, "idle_s": 9.6, "collective": collective, "stacks": stacks}

    same = word("step 3, backward", "a.py:1 f", "gloo:all_reduce")
    assert summary({0: same, 1: word("step 3, data", "b.py:2 g"), 2: same}) == [
        "rank 1 (n0, process 5): step 3, data, for 10 s",
        "    at megalite/b.py:2 g",
        "rank 0, 2 (n0, process 5): step 3, backward, for 10 s; newest collective: gloo:all_reduce",
        "    at megalite/a.py:1 f",
    ]

"""Ranks that make no progress end, with a report of where each stands; others go on. A lost rank is named."""

import json
import linecache
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.launch import watchdog
from megalite.launch.context import LONGEST_PAUSE_S, ParallelContext
from megalite.launch.watchdog import SAVES, Doing, Watchdog, find_cause, summary
from megalite.train.build import open_context
from tests.bad_input.launching import free_port
from tests.launch.test_startup import cpu_config, environment
from tests.ranks import run_ranks

PATIENCE_S = 0.6
SAVING = Doing("save", "in a save", "parallel.timeout_s", PATIENCE_S, SAVES)


def training(mark: int, words: str = "") -> Doing:
    return Doing(mark, words, "parallel.timeout_s", PATIENCE_S)


def watched(
    context: ParallelContext, doing: Callable[[], Doing], folder: Path, report_s: float = 8.0, **more: Any
) -> Watchdog:
    """A watchdog that takes less time than usual."""
    watchdog.REPORT_S, watchdog.ROLL_S = report_s, 2.0
    return Watchdog(context, doing, folder, ["here"] * context.world_size, **more)


def told(folder: Path, rank: int, first: str) -> None:
    """An alert that takes its time."""
    time.sleep(1.5)
    (folder / f"alert-{rank}").write_text(first)


def waits_for_a_lock_that_nobody_frees() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _hang(context: ParallelContext, folder: Path, holds_lock: bool) -> None:
    """Rank 1 hangs without a collective; the others wait for it in one."""
    doing = SAVING if holds_lock else training(7, f"step 7 of rank {context.rank}")
    with watched(context, lambda: doing, folder, alert=lambda first: told(folder, context.rank, first)):
        if context.rank == 1 and holds_lock:
            pattern = "a" * 40
            __import__("re").match("(a+)+$", pattern + "b")  # for ever, without a look at who else wants to run
        if context.rank == 1:
            waits_for_a_lock_that_nobody_frees()
        try:
            dist.all_reduce(torch.ones(1), group=context.group("dp-cp"))
        except RuntimeError:  # another one has ended a moment earlier
            time.sleep(12)
            raise AssertionError("this rank was not ended") from None


def report(folder: Path) -> Any:
    """The only one."""
    [path] = folder.glob("hang-*.json")
    return json.loads(path.read_text())


def test_every_rank_says_where_it_stands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(_hang, 3, tmp_path, False, may_die=[0, 1, 2], timeout=30) == [None] * 3
    found = report(tmp_path)
    assert found["finding"] == "all ranks answer"
    [alert] = tmp_path.glob("alert-*")
    assert alert.read_text() == "no progress within parallel.timeout_s (0.6 s); all ranks answer"
    assert [word["doing"] for word in found["ranks"].values()] == [f"step 7 of rank {rank}" for rank in "012"]
    assert "waits_for_a_lock_that_nobody_frees" in found["ranks"]["1"]["stacks"]["MainThread"][-1]
    assert "all_reduce" in " ".join(found["ranks"]["0"]["stacks"]["MainThread"])


def test_the_parts_of_a_report_fit_into_its_time() -> None:
    """To call, to hear of it, to answer, to write, to read: else a second report would contradict the first."""
    polling = LONGEST_PAUSE_S
    spent = 2 * watchdog.LOOK_S + watchdog.ROLL_S + watchdog.WRITE_S + polling + watchdog.READ_S
    assert spent < 0.75 * watchdog.REPORT_S
    assert watchdog.LOOK_S + watchdog.ROLL_S + watchdog.WRITE_S + polling < watchdog.REPORT_S / 2  # for a verdict
    assert 2 * watchdog.LOOK_S < watchdog.ROLL_S  # who is busy answers


def test_a_rank_that_cannot_answer_is_named_and_no_slow_disk(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="1"):  # rank 1 is killed by the time-out of the test
        run_ranks(_hang, 3, tmp_path, True, may_die=[0, 2], timeout=9)
    found = report(tmp_path)
    assert found["finding"].startswith("no answer from rank 1 on here: stopped")
    assert sorted(found["ranks"]) == ["0", "2"]


def _save(context: ParallelContext, folder: Path) -> None:
    """A save without an end."""
    with watched(context, lambda: SAVING._replace(may_take=3), folder):
        time.sleep(30)


def test_a_save_that_does_not_end_ends_the_job(tmp_path: Path) -> None:
    began = time.monotonic()
    assert run_ranks(_save, 2, tmp_path, may_die=[0, 1], timeout=30) == [None] * 2
    assert time.monotonic() - began > 3 * PATIENCE_S
    assert report(tmp_path)["ranks"]["0"]["doing"] == "in a save"


def _go_on(context: ParallelContext, folder: Path, waits: bool) -> str:
    at = [0]
    with watched(context, lambda: SAVING if waits else training(at[0]), folder, 4.0):
        for _ in range(90 if waits else 30):  # longer than PATIENCE_S + REPORT_S
            time.sleep(PATIENCE_S / 10)
            at[0] += 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("watchdog")]
    time.sleep(2 * PATIENCE_S)  # it watches no longer
    return "alive"


@pytest.mark.parametrize("waits", [False, True])
def test_who_goes_on_or_waits_for_a_disk_is_left_alone(tmp_path: Path, waits: bool) -> None:
    assert run_ranks(_go_on, 2, tmp_path, waits) == ["alive"] * 2
    assert not [*tmp_path.iterdir()]


def _suspended(context: ParallelContext, folder: Path) -> str:
    """Stopped for twice as long as a step may take, as with a laptop whose lid is closed."""
    with watched(context, lambda: Doing(1, "step 1", "parallel.timeout_s", 2.0), folder):
        if (child := os.fork()) == 0:
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(4.0)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(1.0)
    return "alive"


def test_time_in_which_all_are_stopped_does_not_count(tmp_path: Path) -> None:
    assert run_ranks(_suspended, 2, tmp_path) == ["alive"] * 2


def _busy_beside_one_that_hangs(context: ParallelContext, folder: Path) -> None:
    """Rank 1 goes on and on; rank 0 waits for it longer than it may."""
    at = [0]
    with watched(context, lambda: training(at[0], "busy"), folder):
        for _ in range(300):
            time.sleep(0.1)
            at[0] += context.rank


def test_a_rank_that_is_busy_answers(tmp_path: Path) -> None:
    assert run_ranks(_busy_beside_one_that_hangs, 2, tmp_path, may_die=[0, 1], timeout=20) == [None] * 2
    found = report(tmp_path)
    assert found["finding"] == "all ranks answer"
    assert found["ranks"]["1"]["idle_s"] < PATIENCE_S <= found["ranks"]["0"]["idle_s"]


def _hang_with_its_disk(context: ParallelContext, folder: Path) -> None:
    """Whoever touches the disk hangs, like the main thread."""

    def hang(*_: Any, **__: Any) -> Any:
        time.sleep(60)

    watchdog.WRITE_S = 1.0
    os.dup2(os.open(folder / f"stderr-{context.rank}", os.O_CREAT | os.O_WRONLY), 2)
    Path.write_text = linecache.checkcache = linecache.updatecache = hang  # type: ignore[method-assign,assignment]
    with watched(context, lambda: training(1, "step 1"), folder):
        hang()


def test_a_disk_that_hangs_keeps_nobody_from_the_report(tmp_path: Path) -> None:
    assert run_ranks(_hang_with_its_disk, 2, tmp_path, may_die=[0, 1], timeout=20) == [None] * 2
    told = "".join((tmp_path / f"stderr-{rank}").read_text() for rank in range(2))
    assert "megalite: no progress within parallel.timeout_s (0.6 s); all ranks answer\n" in told
    assert "_hang_with_its_disk" in told
    assert "megalite: if a step may take so long: a larger parallel.timeout_s" in told


def test_ranks_that_do_the_same_share_a_line_and_others_come_first() -> None:
    def word(rank: int, doing: str, at: str) -> dict[str, Any]:
        return {"host": f"n{rank}", "pid": 5 + rank, "idle_s": 8.6 + rank, "doing": doing, "at": at}

    same = {rank: word(rank, "step 3, backward", "megalite/a.py:1 f") for rank in (0, 2)}
    assert summary(same | {1: word(1, "step 3, data", "megalite/b.py:2 g")}) == [
        "rank 1 (n1, process 6): step 3, data, for 10 s",
        "    at megalite/b.py:2 g",
        "rank 0 (n0, process 5), 2 (n2, process 7): step 3, backward, for 11 s",
        "    at megalite/a.py:1 f",
    ]


def _lose(context: ParallelContext, port: int, lost: int, dies: bool) -> str:
    """The cause as this rank tells it, where rank `lost` dies or fails by itself."""
    context.close()
    started = open_context(cpu_config(), environment(context.rank, context.world_size, port))
    started.barrier()
    if context.rank == lost and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank == lost:
        return find_cause(started, ValueError("no such token"))
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1), group=started.group("dp-cp"))
    return find_cause(started, caught.value)


@pytest.mark.parametrize(
    ("lost", "dies", "cause"),
    [
        (1, True, "no word from rank 1: killed, stopped or hanging"),
        (1, False, rf"rank 1 on {socket.gethostname()}: ValueError: no such token"),
        (0, True, "rank 0 has ended, and with it the place where the ranks met"),
    ],
)
def test_the_ranks_that_are_left_agree_on_who_ended_the_job(lost: int, dies: bool, cause: str) -> None:
    causes = run_ranks(_lose, 2, free_port(), lost, dies, may_die=[lost])
    assert {*causes} - {None} == {cause}

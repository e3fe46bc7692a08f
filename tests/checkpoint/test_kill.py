"""Killed at any moment: an acknowledged checkpoint is never lost, and what is found is whole.

The ranks save in a loop, rank 0 noting each step for which `save` has returned; a timer kills one or both of them with
SIGKILL. Every trial goes on in the folder that the last one left, as a restarted job does.
"""

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from megalite.checkpoint.commit import committed, recover
from megalite.checkpoint.store import newest, save
from megalite.parallel.context import ParallelContext
from tests.checkpoint.samples import SINGLE, blank, cut, equal, no_report, values, whole
from tests.ranks import run_ranks


def save_until_killed(context: ParallelContext, root: Path, victims: list[int], delay: float) -> None:
    """Start like a job: clear up, find the newest, go on from there. Ends by SIGKILL, or as its partner is gone."""
    folder = root / "checkpoints"
    if context.rank == 0:
        recover(folder)
    found = newest(folder, context, no_report)
    step = found.step if found else 0
    context.barrier()
    if context.rank in victims:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            step += 1
            pieces = cut("flat", values(step), context.rank, context.world_size)
            save(folder, step, pieces, {"step": step}, context, keep=2)
            if context.rank == 0:
                with (root / "acknowledged").open("a") as file:
                    file.write(f"{step}\n")
    except RuntimeError:
        assert context.rank not in victims, "this rank should have been killed"


def check(root: Path) -> int:
    """The newest checkpoint is at least the last acknowledged one, whole, and its values are its step's."""
    log = root / "acknowledged"
    acknowledged = int(log.read_text().split("\n")[-2]) if log.exists() else 0
    found = newest(root / "checkpoints", SINGLE, no_report)
    if found is None:
        assert acknowledged == 0
        return 0
    assert acknowledged <= found.step <= acknowledged + 1
    assert found.state == {"step": found.step}
    pieces = blank(whole(values(found.step)))
    found.read_into(pieces)
    assert equal(pieces, whole(values(found.step)))
    assert len(committed(root / "checkpoints")) <= 3
    return found.step


def kill_again_and_again(root: Path, ranks: int, trials: int, seed: int) -> None:
    chance = random.Random(seed)
    last = 0
    for trial in range(trials):
        victims = chance.choice([[rank] for rank in range(ranks)] + [list(range(ranks))])
        # From the very first call, which may take tenths of a second, to some tens of saves (4 to 20 ms each) later.
        delay = chance.uniform(0.0, 0.25 * (1 + trial % 4))
        run_ranks(save_until_killed, ranks, root, victims, delay, may_die=victims)
        reached = check(root)
        assert reached >= last
        last = reached
    assert last > 0, "no trial lived long enough to save anything"
    recover(root / "checkpoints")
    assert all(name.startswith("step-") for name in os.listdir(root / "checkpoints"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path, ranks: int) -> None:
    kill_again_and_again(tmp_path, ranks, trials=6, seed=ranks)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_many_kills_at_any_moment_lose_nothing(tmp_path: Path, ranks: int) -> None:
    kill_again_and_again(tmp_path, ranks, trials=60, seed=10 + ranks)


def save_in_place(context: ParallelContext, root: Path, delay: float) -> None:
    """What would happen without the temporary folder: the files of a step are written under its final name."""
    from megalite.checkpoint import commit

    def begin_in_place(folder: Path, step: int) -> Path:
        final = folder / commit.step_name(step)
        final.mkdir(parents=True)
        return final

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "begin", begin_in_place)
        patch.setattr(commit, "publish", lambda temporary, step: temporary)
        save_until_killed(context, root, [0], delay)


def test_without_the_rename_kills_do_leave_broken_checkpoints(tmp_path: Path) -> None:
    """The negative control: these kills do hit half-written checkpoints."""
    broken = 0
    for trial in range(20):
        root = tmp_path / str(trial)
        run_ranks(save_in_place, 1, root, 0.03 + trial * 0.003, may_die=[0])
        reports: list[str] = []
        try:
            newest(root / "checkpoints", SINGLE, reports.append)
        except Exception:
            reports.append("none is left")
        broken += bool(reports)
        if broken:
            return
    pytest.fail("20 kills hit no half-written checkpoint")

"""Killed at any moment: an acknowledged checkpoint is never lost, and what is found is whole.

The ranks save in a loop, themselves or behind it, rank 0 noting each step whose save has ended; a timer kills one of
them or all with SIGKILL. Every trial goes on in the folder that the last one left, as a restarted job does.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint import commit, store
from megalite.checkpoint.commit import committed, recover
from megalite.checkpoint.manifest import Piece
from megalite.checkpoint.reading import newest
from megalite.checkpoint.store import BackgroundSaves, Saved, save, write_file
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import GroupNeeds
from tests.checkpoint.samples import SINGLE, blank, cut, equal, no_report, values, whole
from tests.ranks import run_ranks


def save_until_killed(context: ParallelContext, root: Path, behind: bool, victims: list[int], delay: float) -> None:
    """Start like a job: clear up, find the newest, go on from there. Ends by SIGKILL, or as its partner is gone."""
    folder = root / "checkpoints"
    if context.rank == 0:
        recover(folder)
    found = newest(folder, context, no_report)
    step = found.manifest.step if found else 0
    context.barrier()
    if context.rank in victims:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    saves = partial(save_behind, BackgroundSaves(context)) if behind else save_at_once
    try:
        while True:
            step = saves(context, root, step + 1)
    except RuntimeError:
        if context.rank in victims:
            assert len(victims) > 1, "this rank should have been killed"
            time.sleep(60)  # its turn comes


def save_at_once(context: ParallelContext, root: Path, step: int) -> int:
    pieces = cut("flat", values(step), context.rank, context.world_size)
    save(root / "checkpoints", step, pieces, {"step": step}, context, keep=2)
    acknowledge(context, root, step)
    return step


def save_behind(saves: BackgroundSaves, context: ParallelContext, root: Path, step: int) -> int:
    """The state goes on changing while it is written."""

    def write(pieces: Sequence[Piece], its: ParallelContext) -> Saved:
        return save(root / "checkpoints", step, pieces, {"step": step}, its, keep=2)

    pieces = cut("flat", values(step), context.rank, context.world_size)
    pending = saves.begin(pieces, write, begun=time.perf_counter())
    for piece in pieces:
        piece.tensor.zero_()
    pending.result()
    acknowledge(context, root, step)
    return step


def acknowledge(context: ParallelContext, root: Path, step: int) -> None:
    if context.rank == 0:
        with (root / "acknowledged").open("a") as file:
            file.write(f"{step}\n")


def check(root: Path, last: int = 0) -> int:
    """The newest checkpoint is at least the last acknowledged one, whole, and its values are its step's.

    `last`: what the trial before has left, acknowledged or not.
    """
    log = root / "acknowledged"
    *lines, _ = log.read_text().split("\n") if log.exists() else [""]
    acknowledged = int(lines[-1]) if lines else 0  # a kill may come before the first line is whole
    found = newest(root / "checkpoints", SINGLE, no_report)
    if found is None:
        assert acknowledged == last == 0
        return 0
    assert max(acknowledged, last) <= found.manifest.step <= max(acknowledged, last) + 1
    assert found.state == {"step": found.manifest.step}
    pieces = blank(whole(values(found.manifest.step)))
    found.read_into(pieces)
    assert equal(pieces, whole(values(found.manifest.step)))
    return found.manifest.step


def kill_again_and_again(root: Path, ranks: int, behind: bool, trials: int, seed: int) -> None:
    chance = random.Random(seed)
    last = 0
    for trial in range(trials):
        victims = chance.choice([[rank] for rank in range(ranks)] + [list(range(ranks))])
        # From the very first call, which may take tenths of a second, to some tens of saves (4 to 20 ms each) later.
        delay = chance.uniform(0.0, 0.25 * (1 + trial % 4))
        run_trial(save_until_killed, ranks, root, behind, victims, delay)
        last = check(root, last)
    assert last > 0, "no trial lived long enough to save anything"
    recover(root / "checkpoints")
    assert all(name.startswith("step-") for name in os.listdir(root / "checkpoints"))
    save_at_once(SINGLE, root, last + 1)
    assert [step for step, _ in committed(root / "checkpoints")] == [last + 1, last], "kills left more; one save clears"


def run_trial(
    function: Callable[..., None], ranks: int, root: Path, behind: bool, victims: list[int], delay: float
) -> None:
    root.mkdir(exist_ok=True)
    needs = GroupNeeds(background_saving=behind)
    run_ranks(function, ranks, root, behind, victims, delay, may_die=victims, needs=needs)


behind_or_not = pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind"])


@behind_or_not
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path, ranks: int, behind: bool) -> None:
    kill_again_and_again(tmp_path, ranks, behind, trials=6, seed=ranks)


def write_in_place(patch: pytest.MonkeyPatch) -> None:
    """What would happen without the temporary folder: the files of a step are written under its final name."""

    def begin_in_place(folder: Path, step: int) -> Path:
        final = folder / commit.step_name(step)
        final.mkdir(parents=True)
        return final

    patch.setattr(commit, "begin", begin_in_place)
    patch.setattr(commit, "publish", lambda temporary, step: temporary)


def commit_before_the_data_is_written(patch: pytest.MonkeyPatch) -> None:
    """The rename comes first, and the tensors follow."""
    publish = commit.publish
    later: list[tuple[str, bytes]] = []

    def put_off(path: Path, pieces: Sequence[Piece]) -> Any:
        written = write_file(path, pieces)
        later.append((path.name, path.read_bytes()))
        path.unlink()
        return written

    def too_early(temporary: Path, step: int) -> None:
        publish(temporary, step)
        final = temporary.with_name(commit.step_name(step))
        time.sleep(0.02)  # large files take longer than these
        for name, content in later:
            (final / name).write_bytes(content)
        later.clear()

    patch.setattr(store, "write_file", put_off)
    patch.setattr(commit, "publish", too_early)


def acknowledge_when_begun(patch: pytest.MonkeyPatch) -> None:
    """Whoever asks is told that a save behind the loop has ended; only the next one waits for it."""
    begin = BackgroundSaves.begin
    before: list[Future[Saved]] = []

    def begin_in_order(self: BackgroundSaves, *args: Any, **kwargs: Any) -> Future[Saved]:
        wait(before)
        before[:] = [begin(self, *args, **kwargs)]
        return before[0]

    patch.setattr(BackgroundSaves, "begin", begin_in_order)
    patch.setattr(Future, "result", lambda self: None)


MUTANTS = {
    "at once": [write_in_place, commit_before_the_data_is_written],
    "behind": [write_in_place, commit_before_the_data_is_written, acknowledge_when_begun],
}


def save_wrongly(
    context: ParallelContext, root: Path, behind: bool, victims: list[int], delay: float, mutant: Callable[..., None]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        save_until_killed(context, root, behind, victims, delay)


@pytest.mark.parametrize(
    ("behind", "mutant"),
    [(way == "behind", mutant) for way, mutants in MUTANTS.items() for mutant in mutants],
    ids=[f"{way}-{mutant.__name__}" for way, mutants in MUTANTS.items() for mutant in mutants],
)
def test_kills_do_show_what_would_be_wrong(tmp_path: Path, behind: bool, mutant: Callable[..., None]) -> None:
    """The negative control: these kills do hit half-written checkpoints, and `check` notices them."""
    for trial in range(30):
        root = tmp_path / str(trial)
        run_trial(partial(save_wrongly, mutant=mutant), 1, root, behind, [0], min(1.0, 0.03 * 1.3**trial))
        try:
            check(root)
        except Exception:
            return
    pytest.fail("30 kills hit no half-written checkpoint")

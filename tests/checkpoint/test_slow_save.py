"""A disk that is slower than parallel.timeout_s breaks no rank that waits for it."""

import time
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint import commit, store
from megalite.checkpoint.store import BackgroundSaves, save
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import GroupNeeds
from tests.checkpoint.samples import cut, values
from tests.ranks import run_ranks

TIMEOUT_S = 0.5


def save_slowly(context: ParallelContext, folder: Path, slow: str, behind: bool) -> str:
    """The outcome of a save in which one function takes three time-outs, on one of the ranks."""
    module = store if slow == "write_file" else commit
    function, pieces = getattr(module, slow), cut("flat", values(1), context.rank, context.world_size)

    def slowly(*args: Any, **named: Any) -> Any:
        if context.rank == (slow == "write_file"):
            time.sleep(3 * TIMEOUT_S)
        return function(*args, **named)

    def write(pieces: Any, context: ParallelContext) -> Any:
        return save(folder, 1, pieces, {}, context, keep=2)

    context.set_timeout(TIMEOUT_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, slow, slowly)
        if behind:
            saved = BackgroundSaves(context).begin(pieces, write, begun=time.perf_counter()).result()
        else:
            saved = write(pieces, context)
    context.barrier()
    return str(saved.path.name)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("slow", ["begin", "write_file", "publish", "retire"])
def test_ranks_wait_for_a_slow_disk(slow: str, behind: bool, tmp_path: Path) -> None:
    needs = GroupNeeds(background_saving=True)
    folder = tmp_path / "checkpoints"
    assert run_ranks(save_slowly, 2, folder, slow, behind, needs=needs) == ["step-00000001"] * 2

"""Lists, verifies and prunes the checkpoints of a run.

    python -m megalite checkpoints runs/mine
    python -m megalite checkpoints runs/mine --verify
    python -m megalite checkpoints runs/mine --prune 2

Without --verify only what says what a checkpoint holds is read, with it every byte; exit status 1 if one is damaged.
--prune N deletes all but the newest N that are whole, while no job has the run.
"""

import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megalite.commands.command import COUNT, Shown, command, option
from megalite.config.files import LOCK, RUN, refusing
from megalite.errors.problems import Problem, UserError, several
from megalite.observe.readable import size as size_words


class Listed(NamedTuple):
    """A checkpoint. `fault`: what is wrong with it; empty where nothing was found."""

    step: int
    path: Path
    tokens: int
    bytes: int
    written: float  # seconds since 1970
    fault: str


@command(
    option("run_dir", type=Path, metavar="RUN_DIR", help="the folder of a run"),
    option("--verify", action="store_true", help="read every byte"),
    option("--prune", **COUNT, help="delete all but the newest N that are whole"),
    overrides=False,
)
def checkpoints(options: Namespace, overrides: list[str]) -> Shown:
    run = options.run_dir
    if not (run / RUN).is_file():
        raise UserError(
            Problem("RUN_DIR", str(run), f"it holds no run: there is no {RUN}", "the folder of a run: ls runs")
        )
    listed = listed_in(run, whole=options.verify)
    deleted = pruned(run, listed, options.prune) if options.prune else []
    damaged = any(each.fault for each in listed)
    return Shown(table(listed, deleted, verified=options.verify), status=int(damaged))


def listed_in(run: Path, *, whole: bool) -> list[Listed]:
    """The checkpoints of a run, newest first; `whole`: every byte of them is read."""
    from megalite.checkpoint.commit import CHECKPOINTS, STATE, committed
    from megalite.checkpoint.reading import Found, inspect
    from megalite.launch.context import ParallelContext

    def look(step: int, path: Path) -> Listed:
        found = inspect(path, ParallelContext(), json_only=not whole)
        if not isinstance(found, Found):
            return Listed(step, path, 0, 0, 0.0, found)
        missing = [name for name, (size, _) in found.manifest.files.items() if _size(path / name) != size]
        total, written = sum(size for size, _ in found.manifest.files.values()), (path / STATE).stat().st_mtime
        fault = f"{missing[0]} is missing or of another size" if missing else ""
        return Listed(step, path, found.state["progress"]["tokens"], total, written, fault)

    return [look(step, path) for step, path in committed(run / CHECKPOINTS)]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def pruned(run: Path, listed: list[Listed], keep: int) -> list[int]:
    """The steps of the checkpoints that were deleted. UserError where a job has the run."""
    from megalite.checkpoint.commit import delete
    from megalite.checkpoint.run_folder import take_lock

    older = [each for each in listed if not each.fault][keep:]
    lock, _ = take_lock(run / LOCK)
    try:
        with refusing(run, "set its permissions"):
            for each in older:
                delete(each.path)
    finally:
        lock.truncate(0)
        lock.close()
    return [each.step for each in older]


def table(listed: list[Listed], deleted: list[int], *, verified: bool) -> Iterator[str]:
    """A line for each checkpoint."""
    yield f"{'step':>10} {'tokens':>16} {'size':>10}  {'written':<16}  state"
    for each in listed:
        place = f", a link to {each.path.readlink()}" if each.path.is_symlink() else ""
        state = (
            "deleted" if each.step in deleted else each.fault or ("every byte as written" if verified else "complete")
        )
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.written)) if each.written else "-"
        yield f"{each.step:>10,} {each.tokens:>16,} {size_words(each.bytes):>10}  {written:<16}  {state}{place}"
    yield f"{several(len(listed), 'checkpoint')}, {size_words(sum(each.bytes for each in listed))}"

"""Makes, commits, prunes and clears the folders of checkpoints, on rank 0. The commit is a rename.

    .tmp-step-00000200-<attempt>   being written; no checkpoint until it is renamed
    step-00000200                  complete, never changed again; a link counts as its folder, on another disk
    .trash-step-00000100-<attempt> being deleted
    step-00000300.bad-<time>       found damaged (reading.py), kept for people

A folder gets a `step-` name only when all its files are on disk (synced before the rename), and loses it before the
first of its files is deleted; so a kill or a power cut at any point leaves only whole checkpoints under that name.
"""

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from megalite.config.files import sync_folder

CHECKPOINTS = "checkpoints"  # of a run folder
STATE = "state.json"  # of a checkpoint
_STEP = re.compile(r"step-\d{8}")
_UNFINISHED = re.compile(r"\.(tmp|trash)-step-\d{8}-[0-9a-f]{8}")


def step_name(step: int) -> str:
    assert 0 <= step < 10**8, step
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def committed(folder: Path) -> list[tuple[int, Path]]:
    """The steps under a final name, newest first. They are ordered by number: clocks of file systems may be wrong."""
    paths = [path for path in (folder.iterdir() if folder.is_dir() else ()) if _STEP.fullmatch(path.name)]
    return sorted(((step_of(path), path) for path in paths if path.is_dir() or path.is_symlink()), reverse=True)


def begin(folder: Path, step: int) -> Path:
    """A fresh temporary folder for one attempt to write `step`."""
    folder.mkdir(exist_ok=True)  # a run folder that is not there any more is not made anew
    temporary = folder / f".tmp-{step_name(step)}-{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


def publish(temporary: Path, step: int) -> None:
    """Make a completely written temporary folder the checkpoint of `step`, durably; OSError where there is one."""
    final = temporary.with_name(step_name(step))
    sync_folder(temporary)
    os.rename(temporary, final)  # the commit point
    sync_folder(temporary.parent)


def retire(folder: Path, step: int, keep: int, *, good_before: int = 0, spared: int | None = None) -> None:
    """Keep `step`, the newest `keep` - 1 checkpoints before it, the newest one before step `good_before` and that
    of step `spared`; delete the older ones. What cannot be deleted costs space: the next save tries again."""
    with contextlib.suppress(OSError):
        older = [(at, path) for at, path in committed(folder) if at < step]
        good = next((path for at, path in older if at < good_before), None)
        for path in (path for at, path in older[keep - 1 :] if path != good and at != spared):
            delete(path)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint; OSError where that cannot be. Where a link leads, nothing is deleted."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
    else:  # first its name: a half deleted folder cannot pass for a checkpoint
        trash = checkpoint.with_name(f".trash-{checkpoint.name}-{secrets.token_hex(4)}")
        os.rename(checkpoint, trash)
        shutil.rmtree(trash)


def recover(folder: Path) -> None:
    """Clear up after attempts that were killed. Only for the owner of the run's lock, when nothing is being saved."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path)

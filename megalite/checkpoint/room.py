"""Checks before a run begins whether the disk has room for its checkpoints."""

import shutil
from pathlib import Path

from megalite.checkpoint.commit import committed
from megalite.errors.problems import Problem, UserError


def judge_room(folder: Path, size: int, *, keep: int, saves: int) -> str:
    """A warning where the disk of `folder`, that of a run's checkpoints, has room for one of `size` bytes but not for
    all that will be there at once; empty where it has. UserError if not even one fits.

    `saves` checkpoints are still to be written; one gives way to the next only when more than `keep` are complete, and
    the newest has one before it.
    """
    try:
        usage = shutil.disk_usage(folder if folder.exists() else folder.parent)
        saved = len(committed(folder))
    except OSError:
        return ""
    if usage.total == 0 or saves == 0:  # some network disks do not tell
        return ""
    room = f"a checkpoint needs about {size_in_words(size)}, {size_in_words(usage.free)} are free in {folder.parent}"
    if usage.free < size:
        elsewhere = "move the whole folder to another disk and name it there" if saved else "name a folder elsewhere"
        raise UserError(Problem("run_dir", str(folder.parent), room, f"make room, or {elsewhere}"))
    more = min(saves, max(1, max(keep, 2) + 1 - saved))
    if usage.free < more * size:
        return f"warning: {room}; {more} more are to fit (checkpoint.keep={keep} and the one being written)"
    return ""


def size_in_words(amount: int) -> str:
    """5.2 GiB"""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= scale:
            return f"{amount / scale:.1f} {unit}"
    return f"{amount} bytes"

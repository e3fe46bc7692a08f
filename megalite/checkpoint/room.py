"""Whether a disk has room for a run's checkpoints, judged before the run begins."""

import shutil
from pathlib import Path

from megalite.checkpoint.commit import committed
from megalite.config.problems import Problem, UserError


def judge_room(folder: Path, size: int, keep: int) -> str:
    """A warning where the disk of `folder`, that of a run's checkpoints, has room for one of `size` bytes but not for
    `keep` of them and the one being written; empty where it has. UserError if not even one fits."""
    usage = shutil.disk_usage(folder if folder.exists() else folder.parent)
    if usage.total == 0:  # some network disks do not tell
        return ""
    room = f"a checkpoint needs about {size_in_words(size)}, {size_in_words(usage.free)} are free in {folder}"
    if usage.free < size:
        remedy = "make room, or set run_dir to a folder on another disk"
        raise UserError(Problem("run_dir", str(folder.parent), room, remedy))
    wanted = max(1, keep + 1 - len(committed(folder)))  # one at least is written before an old one goes
    if usage.free < wanted * size:
        return f"warning: {room}; {wanted} more are to fit (checkpoint.keep={keep} and the one being written)"
    return ""


def size_in_words(amount: int) -> str:
    """5.2 GiB"""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= scale:
            return f"{amount / scale:.1f} {unit}"
    return f"{amount} bytes"

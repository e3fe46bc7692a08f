"""Whether a run may be kept in a folder: it can be written, and nobody else's files are in it. Needs no torch.

A run writes files by names that others use, too (config.yaml), so a folder is a run's, by its run.json, or holds no
files but logs: those that a scheduler or a shell puts there before a run begins.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megalite.config.own_files import RUN_LOCK, in_the_way
from megalite.errors.problems import Problem

RUN = "run.json"  # the first file that a run writes
LOCK = RUN_LOCK.usual  # left by a run that was killed before it wrote another
_LOGS = (".log", ".out", ".err")
_FOLDERS = ("checkpoints", "tokenizer")  # others are only added to
OWN = (  # all that a run names itself
    *(RUN, LOCK, *_FOLDERS, "config.yaml", "metrics.jsonl", "events.jsonl", "pipeline.jsonl", "report.html"),
    *("token_files.json", "wandb.json", "logs", "profile", "tensorboard", "wandb"),
)


def run_dir_problems(value: str, folder: Path) -> Iterator[Problem]:
    """What stands against a run in `folder`, which was asked for as run_dir=`value`."""
    existing = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not existing.is_dir():
        remedy = "a new folder, or that of a run to continue"
        yield Problem("run_dir", value, f"{existing} is not a folder", remedy, here=True)
        return
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".megalite-", dir=existing))  # root may write anywhere, but not to /proc
        names = _names_of_others(folder) if existing == folder else []
    except OSError as error:
        rule = f"{existing} cannot be written: {error.strerror}"
        yield Problem("run_dir", value, rule, "a folder where you may write, on a disk with room", here=True)
        return
    if names:
        rule = f"it holds {', '.join(names[:5])}, and {folder} is not the folder of a run (there is no {RUN})"
        remedy = f"a new folder; *{', *'.join(_LOGS)} may be in it. If it was a run's, put its {RUN} back"
        yield Problem("run_dir", value, rule, remedy, here=True)


def _names_of_others(folder: Path) -> list[str]:
    """What somebody may miss in a folder without a run."""
    if (folder / RUN).exists():
        return []
    folders = [name for name in _FOLDERS if (folder / name).is_dir() and os.listdir(folder / name)]
    files = [path.name for path in sorted(folder.iterdir()) if not path.is_dir()]
    others = [name for name in files if not name.startswith(".") and not name.endswith(_LOGS)]
    return folders + [name for name in others if name != LOCK or in_the_way(folder / name, RUN_LOCK)]

"""Whether a run may be kept in a folder: it can be written, and nobody else's files are in it. Needs no torch.

A run writes files by names that others use, too (config.yaml), so a folder is a run's, by its run.json, or holds no
files but logs: those that a scheduler or a shell puts there before a run begins.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megalite.config.user_files import read_object
from megalite.errors.problems import Problem, UserError

RUN = "run.json"  # the first file that a run writes
LOCK = "lock"
_LOGS = (".log", ".out", ".err")
_FOLDERS = ("checkpoints", "tokenizer")
_WRITTEN = ("config.yaml", "metrics.jsonl", "events.jsonl", "report.html", "pipeline.jsonl", "wandb.json", LOCK)


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
        in_danger = [name for name in names if name in _WRITTEN + _FOLDERS]
        what = f"a run would write over {_listed(in_danger)}" if in_danger else f"it holds {_listed(names)}"
        rule = f"{what} in {folder}, which is not the folder of a run (there is no {RUN})"
        remedy = f"a new folder; *{', *'.join(_LOGS)} may be in it. If it was a run's, put its {RUN} back"
        yield Problem("run_dir", value, rule, remedy, here=True)


def _names_of_others(folder: Path) -> list[str]:
    """What somebody may miss in a folder without a run; folders but two are only added to."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    if any(entry.name == RUN for entry in entries):
        return []
    return [
        entry.name
        for entry in entries
        if (entry.name in _FOLDERS and os.listdir(entry.path) if entry.is_dir() else not _harmless(entry))
    ]


def _harmless(file: "os.DirEntry[str]") -> bool:
    """Whether it is hidden, a log, what this very command prints to, or the lock of a run that is about to begin or was
    killed then."""
    if file.name != LOCK:
        return file.name.startswith(".") or file.name.endswith(_LOGS) or _is_own_output(file)
    with suppress(UserError, OSError):
        return file.stat().st_size == 0 or "token" in read_object(Path(file.path))
    return False


def _is_own_output(file: "os.DirEntry[str]") -> bool:
    with suppress(OSError, ValueError):  # closed, or none of the system's
        streams = [os.fstat(stream.fileno()) for stream in (sys.__stdout__, sys.__stderr__) if stream is not None]
        return any(os.path.samestat(file.stat(), status) for status in streams)
    return False


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")

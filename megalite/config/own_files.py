"""Tells files and folders that megalite has written from those of others.

The name that a user gives for a file to write may be taken: by the text that is trained on, by a device, by a file of
ours with another purpose. A file is replaced only where it is a regular one that begins with the mark of its kind; an
empty file and a link have none. Commands ask before they work, `durable_files` again when the new file takes the place.
A folder is a run's by its run.json, or holds no files but logs: those that a scheduler puts there before a run begins.
"""

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from megalite.errors.problems import Problem

HEAD = 4096  # bytes of a file in which its mark lies
RUN, LOCK = "run.json", "lock"  # the first file that a run writes, and what a killed start may have left before it
_LOGS = (".log", ".out", ".err")
_FOLDERS = ("checkpoints", "tokenizer")  # others are only added to
OWN = (  # all that a run names itself
    *(RUN, LOCK, *_FOLDERS, "config.yaml", "metrics.jsonl", "events.jsonl", "pipeline.jsonl", "report.html"),
    *("token_files.json", "wandb.json", "logs", "profile", "tensorboard", "wandb"),
)


class Kind(NamedTuple):
    """Files of one purpose: in words, a usual name, and a regular expression for the beginning."""

    words: str
    usual: str
    mark: bytes


def _page(name: str) -> bytes:
    """Pages of f4fa60b have a policy in the place of the generator's name."""
    head = rb'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n<meta '
    policy = rb'http-equiv="Content-Security-Policy" content="[^"\n]*sha256-'
    return head + rb'(name="generator" content="megalite %s"|%s)' % (name.encode(), policy)


STATUS = Kind("a status file", "run.status", rb'\{"state": "\w+", "step": \d+, "steps": \d+, "run_dir": "')
REPORT = Kind("the report of a run", "report.html", _page("report"))
COMPARISON = Kind("a comparison of runs", "comparison.html", _page("comparison"))
_FIGURES = rb'\{\n  "hardware": "|\[\n  \{\n    "model": "[\w.]+",\n    "(precision|layer)": '
FIGURES = Kind("figures of a benchmark", "speed.json", _FIGURES)
RUN_LOCK = Kind("the lock of a run", LOCK, rb'\Z|\{"host": ')
POINT = Kind("the record of a sweep's point", "point.json", rb'\{"words": \[')
STOP = Kind("the stop file of a sweep", "stop", rb"\.+\Z")
SWEEP = Kind("Hydra's record of a sweep", "multirun.yaml", rb"hydra:\n")


def picture_of(command: str) -> Kind:
    """Pictures that a command draws. The title of an SVG file says so."""
    mark = rb"<\?xml[\s\S]*<dc:title>megalite %s</dc:title>"
    return Kind(f"a picture of {command}", f"{command}.svg", mark % command.encode())


def in_the_way(path: Path, kind: Kind) -> str:
    """Why a file of this kind may not replace `path`; empty where nothing, or a file of the kind, is there."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode):
            with path.open("rb") as file:
                ours = re.match(kind.mark, file.read(HEAD))
            return "" if ours else f"holds something else than {kind.words} by megalite, and is not replaced"
    except OSError as error:
        return "" if error.errno in (errno.ENOENT, errno.ENOTDIR) else f"cannot be looked at: {error.strerror}"
    what = "a folder" if stat.S_ISDIR(mode) else "a link" if stat.S_ISLNK(mode) else "a device or a pipe"
    return f"is {what}, and is not replaced"


def output_problems(setting: str, path: Path, kind: Kind) -> list[Problem]:
    """The problem with writing a file of this kind to `path`, for a command that has done nothing yet."""
    rule = in_the_way(path, kind)
    taken = path if path.is_file() and not path.is_symlink() else Path(kind.usual)
    remedy = f"{setting}={free_name(taken)}, or move away what is there"
    return [Problem(setting, str(path), rule, remedy)] if rule else []


def free_name(path: Path) -> Path:
    """A name like that of `path`, which no file has."""
    names = chain([path], (path.with_stem(f"{path.stem}-{number}") for number in count(2)))
    return next(name for name in names if not os.path.lexists(name))


def run_dir_problems(value: str, folder: Path) -> Iterator[Problem]:
    """The problem with keeping a run in `folder`, for which the user asked by run_dir=`value`."""
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
    """The files of others in a folder without a run."""
    if (folder / RUN).exists():
        return []
    folders = [name for name in _FOLDERS if (folder / name).is_dir() and os.listdir(folder / name)]
    files = [path.name for path in sorted(folder.iterdir()) if not path.is_dir()]
    others = [name for name in files if not name.startswith(".") and not name.endswith(_LOGS)]
    return folders + [name for name in others if name != LOCK or in_the_way(folder / name, RUN_LOCK)]

"""Tells files and folders that megalite has written from those of others.

The name that a user gives for a file to write may be taken: by the text that is trained on, by a device, by a file of
ours with another purpose. A file is replaced only where it is a regular one that begins with the mark of its kind.
Commands ask before they work, `durable_files` again when the new file takes the place. A folder is a run's by its
run.json, or holds no files but logs, which a scheduler puts there before a run begins.
"""

import os
import re
import stat
import tempfile
from collections.abc import Iterator
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


# Pages of f4fa60b have a policy in the place of the generator's name.
_PAGE = (
    rb'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n<meta (name="generator" content="megalite '
)
_POLICY = rb'"|http-equiv="Content-Security-Policy" content="[^"\n]*sha256-)'
_FIGURES = rb'\{\n  "hardware": "|\[\n  \{\n    "model": "[\w.]+",\n    "(precision|layer)": '
STATUS = Kind("a status file", "run.status", rb'\{"state": "\w+", "step": \d+, "steps": \d+, "run_dir": "')
REPORT = Kind("the report of a run", "report.html", _PAGE + b"report" + _POLICY)
COMPARISON = Kind("a comparison of runs", "comparison.html", _PAGE + b"comparison" + _POLICY)
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
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return "is a folder, and is not replaced" if path.is_dir() else "is no regular file, and is not replaced"
        with path.open("rb") as file:
            ours = re.match(kind.mark, file.read(HEAD))
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    return "" if ours else f"holds something else than {kind.words} by megalite, and is not replaced"


def output_problems(setting: str, path: Path, kind: Kind) -> list[Problem]:
    """The problem with writing a file of this kind to `path`, for a command that has done nothing yet."""
    rule = in_the_way(path, kind)
    remedy = f"another name, like {setting}={kind.usual}, or move away what is there"
    return [Problem(setting, str(path), rule, remedy)] if rule else []


def run_dir_problems(value: str, folder: Path) -> Iterator[Problem]:
    """The problem with keeping a run in `folder`, for which the user asked by run_dir=`value`."""
    existing = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    rule, remedy = "", "a new folder where you may write, or that of a run to continue"
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".megalite-", dir=existing))  # root may write anywhere, but not to /proc
        found = sorted(folder.iterdir()) if existing == folder and not (folder / RUN).exists() else []
        if names := [path.name for path in found if _is_of_others(path)]:
            rule = f"it holds {', '.join(names[:5])}, and is not the folder of a run (there is no {RUN})"
            remedy = f"a new folder; if it was a run's, put its {RUN} back"
    except OSError as error:
        rule = f"{existing} cannot be written: {error.strerror}"
    if rule:
        yield Problem("run_dir", value, rule, remedy, here=True)


def _is_of_others(path: Path) -> bool:
    """Whether a run would write over this, or among what it holds, in a folder without a run."""
    if path.is_dir():
        return path.name in _FOLDERS and any(path.iterdir())
    if path.name == LOCK:
        return bool(in_the_way(path, RUN_LOCK))
    return not path.name.startswith(".") and path.suffix not in _LOGS

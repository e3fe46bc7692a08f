"""Writes files that appear whole or not at all, whatever happens: a kill, a full disk, a power cut.

A file whose name a user gives replaces nothing but a regular file of its own kind, which begins with the kind's mark. A
folder is a run's by its run.json, or holds no files but logs, which a scheduler puts there before a run begins.
"""

import contextlib
import errno
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from megalite.errors.problems import Problem

HEAD = 4096  # bytes of a file in which its mark lies
RUN, LOCK = "run.json", "lock"  # the first file that a run writes, and what a killed start may have left before it
_LOGS = (".log", ".out", ".err")
_FOLDERS = ("checkpoints", "tokenizer")  # others are only added to
OWN = (  # all that a run names itself
    *(RUN, LOCK, *_FOLDERS, "config.yaml", "metrics.jsonl", "events.jsonl", "pipeline.jsonl", "report.html"),
    *("token_files.json", "wandb.json", "logs", "profile", "tensorboard", "wandb"),
)
_OF_THIS_PROCESS = secrets.token_hex(4)  # processes of other machines may have our number


class Kind(NamedTuple):
    """Files of one purpose: in words, a usual name, and a regular expression for the beginning."""

    words: str
    usual: str
    mark: bytes


_PAGE = rb'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n<meta (name="generator" content="'
_POLICY = rb'"|http-equiv="Content-Security-Policy" content="[^"\n]*sha256-)'  # pages of f4fa60b
_FIGURES = rb'\{\n  "hardware": "|\[\n  \{\n    "model": "[\w.]+",\n    "(precision|layer)": '
STATUS = Kind("a status file", "run.status", rb'\{"state": "\w+", "step": \d+, "steps": \d+, "run_dir": "')
REPORT = Kind("the report of a run", "report.html", _PAGE + b"megalite report" + _POLICY)
COMPARISON = Kind("a comparison of runs", "comparison.html", _PAGE + b"megalite comparison" + _POLICY)
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
        if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
            return "is no regular file, and is not replaced"
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
    return [Problem(setting, str(path), rule, f"another name, like {setting}={kind.usual}")] if rule else []


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


def draft_of(path: Path) -> Path:
    """The name under which this process writes a file before it becomes `path`."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{_OF_THIS_PROCESS}")


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Files that are made inside are for their user alone (0600, folders 0700). A umask other than the usual 022 was
    chosen by somebody and stays in force."""
    before = os.umask(0o077)
    os.umask(0o077 if before == 0o022 else before)
    try:
        yield
    finally:
        os.umask(before)


def write_atomically(path: Path, content: bytes, kind: Kind | None = None) -> None:
    """`path` holds either what it held or all of `content`, and its name is on disk when the call returns. Raises
    OSError, and FileExistsError where a file of another kind is there; without a kind, the folder is ours."""
    draft = draft_of(path)
    try:
        write_new(draft, content)
        if kind and (rule := in_the_way(path, kind)):
            raise FileExistsError(errno.EEXIST, rule, str(path))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_new(path: Path, content: bytes) -> None:
    """A new file with this content, on disk when the call returns."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def open_to_append(path: Path) -> TextIO:
    """A text file to append lines to. No link is followed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    return open(descriptor, "a", buffering=1, encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Put the folder's entries on disk: syncing a file does not sync its name. A file is synced alike."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

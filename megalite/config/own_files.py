"""Tells the files that megalite has written from files of others, by a mark at their beginning.

The name that a user gives for a file to write may be taken: by the text that is trained on, by a device, by a file of
ours with another purpose. A file is replaced only where it is a regular one with the mark of its kind; an empty file
and a link have none. Commands ask before they work, `durable_files` again when the new file takes the place.
"""

import errno
import os
import re
import stat
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from megalite.errors.problems import Problem

HEAD = 4096  # bytes of a file in which its mark lies


class Kind(NamedTuple):
    """Files of one purpose: in words, a usual name, and what each of them begins with (a regular expression)."""

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
FACTS = Kind(
    "what is known of a token file", "text.json", rb'\{\n "source": "[^\n]*",\n "fingerprint": "\w+",\n "tokens": \d+,'
)
_FIGURES = rb'\{\n  "hardware": "|\[\n  \{\n    "model": "[\w.]+",\n    "(precision|layer)": '
FIGURES = Kind("figures of a benchmark", "speed.json", _FIGURES)
RUN_LOCK = Kind("the lock of a run", "lock", rb'\Z|\{"host": ')
POINT = Kind("the record of a sweep's point", "point.json", rb'\{"words": \[')
STOP = Kind("the stop file of a sweep", "stop", rb"\.+\Z")
SWEEP = Kind("Hydra's record of a sweep", "multirun.yaml", rb"hydra:\n")


def picture_of(command: str) -> Kind:
    """Pictures that a command draws. The title of an SVG file says so."""
    mark = rb"<\?xml[\s\S]*<dc:title>megalite %s</dc:title>"
    return Kind(f"a picture of {command}", f"{command}.svg", mark % command.encode())


def in_the_way(path: Path, kind: Kind) -> str:
    """Why a file of this kind may not take the place of `path`; empty where nothing is there, or another of its
    kind."""
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
    """What stands against writing a file of this kind to `path`, by a command that has done nothing yet."""
    rule = in_the_way(path, kind)
    taken = path if path.is_file() and not path.is_symlink() else Path(kind.usual)
    remedy = f"{setting}={free_name(taken)}, or move away what is there"
    return [Problem(setting, str(path), rule, remedy)] if rule else []


def free_name(path: Path) -> Path:
    """A name near `path` that nothing has."""
    names = chain([path], (path.with_stem(f"{path.stem}-{number}") for number in count(2)))
    return next(name for name in names if not os.path.lexists(name))

"""Writes files that appear whole or not at all, whatever happens: a kill, a full disk, a power cut.

Where a user names the file, its kind is given, and nothing but a file of that kind is replaced (own_files.py).
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from megalite.config.own_files import Kind, in_the_way

_OF_THIS_PROCESS = secrets.token_hex(4)  # processes of other machines may have our number


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
    """A text file to append lines to. It must be a regular file: no link is followed, and no pipe is waited for."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "a", buffering=1, encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Put the folder's entries on disk: syncing a file does not sync its name. A file is synced alike."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Writes a file so that it appears whole or not at all.

The content goes to a temporary name of this process, is synced to disk, and is renamed. A reader sees the old file or
the new one, never a torn one.
"""

import os
from pathlib import Path


def temporary(path: Path) -> Path:
    """The name under which this process writes what will become `path`."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def write_atomically(path: Path, content: bytes) -> None:
    """`path` holds `content` afterwards, or what it held before if this process is killed on the way."""
    draft = temporary(path)
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

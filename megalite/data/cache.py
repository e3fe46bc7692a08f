"""Where prepared data lives, and how a file appears there: whole or not at all.

Every file is written under a temporary name of this process, synced, and renamed; a reader sees the old state or the
new one, never a torn one. Work that several processes might start at once is done by whoever holds the file lock.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from megalite.config.problems import Problem, UserError
from megalite.config.schema import DataConfig


def cache_folder(data: DataConfig) -> Path:
    """The folder of prepared tokens and trained tokenizers."""
    if data.cache_dir:
        return Path(data.cache_dir).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "megalite"


def make_folder(folder: Path, setting: str = "data.cache_dir") -> Path:
    """Create `folder`; a place that cannot be written is the user's to choose anew."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        remedy = f"choose a writable folder ({setting}=PATH)"
        raise UserError(
            Problem(setting, str(folder), f"cannot be written ({error.strerror or error})", remedy)
        ) from error
    return folder


def digest(*facts: object) -> str:
    """A short name for `facts` (anything that JSON can hold): equal facts, equal name, on every machine."""
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())[:20]


def temporary(path: Path) -> Path:
    """The name under which this process writes what will become `path`."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def write_atomically(path: Path, content: bytes) -> None:
    """`path` holds `content` afterwards, or what it held before if we are killed on the way."""
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


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`. The kernel releases it when its holder dies, so a lock is never stale; the file stays,
    because deleting it would let two processes hold locks on two files of one name."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

"""The folder of prepared data: where it is, that it can be written, and who may work in it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalite.config.schema import DataConfig
from megalite.errors.problems import Problem, UserError


def cache_folder(data: DataConfig) -> Path:
    """The folder of prepared tokens and trained tokenizers."""
    if data.cache_dir:
        return Path(data.cache_dir).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "megalite"


def make_folder(folder: Path, setting: str = "data.cache_dir") -> Path:
    """Create `folder`; UserError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        rule = f"cannot be written ({error.strerror or error})"
        raise UserError(Problem(setting, str(folder), rule, f"choose a writable folder ({setting}=PATH)")) from error
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`. The kernel releases it when its holder dies. The file stays: if it were deleted, two
    processes could hold locks on two files of one name."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

"""The folders of a run's checkpoints, and the one step that makes a checkpoint: a rename.

    .tmp-step-00000200-<attempt>   being written; of no account until renamed
    step-00000200                  complete, never changed again
    .old-step-00000200-<attempt>   moved aside by a second save of the same step
    .trash-step-00000100-<attempt> being deleted
    step-00000300.bad-<time>       found damaged, kept for a look

A folder gets a `step-` name only when all its files are on disk (synced before the rename), and loses it before the
first of its files is deleted; so a kill or a power cut at any point leaves only whole checkpoints under that name.
All functions are rank 0's; they touch nothing but these names.
"""

import contextlib
import os
import re
import secrets
import shutil
import time
from pathlib import Path

_STEP = re.compile(r"step-(\d{8})")
_UNFINISHED = re.compile(r"\.(tmp|trash)-step-\d{8}-[0-9a-f]{8}")
_MOVED_ASIDE = re.compile(r"\.old-(step-\d{8})-[0-9a-f]{8}")


def step_name(step: int) -> str:
    assert 0 <= step < 10**8, step
    return f"step-{step:08d}"


def committed(folder: Path) -> list[tuple[int, Path]]:
    """The steps under a final name, newest first. Ordered by number: clocks of file systems are not to be trusted."""
    if not folder.is_dir():
        return []
    matches = [(_STEP.fullmatch(entry.name), entry) for entry in os.scandir(folder)]
    steps = [(int(match[1]), Path(entry.path)) for match, entry in matches if match and _is_folder(entry)]
    return sorted(steps, reverse=True)


def begin(folder: Path, step: int) -> Path:
    """A fresh temporary folder for one attempt to write `step`."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".tmp-{step_name(step)}-{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


def publish(temporary: Path, step: int) -> Path:
    """Make a completely written temporary folder the checkpoint of `step`, durably."""
    folder = temporary.parent
    final = folder / step_name(step)
    sync_folder(temporary)
    aside = None
    if final.exists():
        aside = folder / f".old-{final.name}-{secrets.token_hex(4)}"
        os.rename(final, aside)
    os.rename(temporary, final)  # the commit point
    sync_folder(folder)
    if aside is not None:
        with contextlib.suppress(OSError):  # the new one is complete; `recover` deletes what is left of the old
            _delete(aside)
    return final


def retire(folder: Path, step: int, keep: int) -> None:
    """Delete the checkpoints before the just completed `step` but the newest `keep` - 1 of them."""
    older = [path for at, path in committed(folder) if at < step]
    for path in older[keep - 1 :]:
        _delete(path)


def recover(folder: Path) -> None:
    """Clear up after attempts that were killed. Only for the owner of the run's lock, when nothing is being saved."""
    if not folder.is_dir():
        return
    for entry in list(os.scandir(folder)):
        aside = _MOVED_ASIDE.fullmatch(entry.name)
        if not _is_folder(entry):
            continue
        if aside and not (folder / aside[1]).exists():
            os.rename(entry.path, folder / aside[1])  # killed between the two renames of `publish`
            sync_folder(folder)
        elif aside or _UNFINISHED.fullmatch(entry.name):
            _delete(Path(entry.path))


def set_aside(path: Path) -> Path:
    """Take a damaged checkpoint out of the running without losing it."""
    aside = path.with_name(f"{path.name}.bad-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")
    os.rename(path, aside)
    sync_folder(path.parent)
    return aside


def discard(temporary: Path) -> None:
    """Remove what a failed attempt has written, as far as the file system lets us; `recover` gets the rest."""
    shutil.rmtree(temporary, ignore_errors=True)


def write_synced(path: Path, content: bytes) -> None:
    """A new file with this content, on disk when the call returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def replace_synced(path: Path, content: bytes) -> None:
    """`path` holds either what it held or all of `content`, whatever happens."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write_synced(temporary, content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the folder's entries on disk: syncing a file does not sync its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete(path: Path) -> None:
    """Take the name away first, so that a half deleted folder cannot pass for a checkpoint."""
    unfinished = _UNFINISHED.fullmatch(path.name)
    trash = path if unfinished else path.with_name(f".trash-{_step_part(path.name)}-{secrets.token_hex(4)}")
    if trash != path:
        os.rename(path, trash)
    shutil.rmtree(trash)


def _step_part(name: str) -> str:
    aside = _MOVED_ASIDE.fullmatch(name)
    return aside[1] if aside else name


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    return entry.is_dir(follow_symlinks=False)

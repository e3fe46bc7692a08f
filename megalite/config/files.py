"""Files of users and runs: read with refusals, and written whole or not at all, whatever happens.

What is wrong with a file that is read is a refusal that names it; only regular files are read, and no pipe is waited
for. A file whose name a user gives replaces nothing but a regular file of its own kind, which begins with the kind's
mark. A folder is a run's by its run.json, or holds no files but logs, which a scheduler puts there before a run begins.
"""

import contextlib
import errno
import io
import json
import os
import re
import secrets
import stat
import tempfile
import types
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import yaml  # type: ignore[import-untyped]

from megalite.errors.problems import NO_VALUE, REMEDIES, Problem, UnavailableError, UserError

RESTORE = "restore it from a copy"
FAULTS = (OSError, ValueError, yaml.YAMLError, RecursionError, OverflowError)  # what reading and parsing raise
HEAD = 4096  # bytes of a file in which its mark lies
RUN, LOCK = "run.json", "lock"  # the first file that a run writes, and what a killed start may have left before it
_LOGS = (".log", ".out", ".err")
_FOLDERS = ("checkpoints", "tokenizer")  # others are only added to
OWN = (  # all that a run names itself
    *(RUN, LOCK, *_FOLDERS, "config.yaml", "metrics.jsonl", "events.jsonl", "pipeline.jsonl", "report.html"),
    *("token_files.json", "wandb.json", "logs", "profile", "tensorboard", "wandb"),
)

Record = TypeVar("Record")


@contextlib.contextmanager
def refusing(place: Path | str, hint: str = RESTORE) -> Iterator[None]:
    """Turns what goes wrong with a file inside into a UserError that names it. The words of a ValueError stand."""
    try:
        yield
    except FAULTS as error:
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        kind = UserError
        if isinstance(error, OSError) and error.errno:  # libraries raise an OSError without a number for a bad content
            kind, hint = UnavailableError, REMEDIES.get(error.errno, hint)
        rule = said if type(error) is ValueError else f"cannot be read: {said}"
        raise kind(Problem(str(place), NO_VALUE, rule, hint, here=True)) from error


def absolute(path: str) -> str:
    """The path seen from the launch folder, with `~` expanded; symbolic links are kept as the user wrote them."""
    return os.path.abspath(os.path.expanduser(path))


def read_bytes(path: Path, hint: str = RESTORE) -> bytes:
    """The content of a regular file; UserError where it is missing, unreadable, a folder or a device."""
    with refusing(path, hint), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("is not a regular file")
        return file.read()


def read_text(path: Path, hint: str = RESTORE) -> str:
    """The content as UTF-8 text."""
    with refusing(path, hint):
        return read_bytes(path, hint).decode()


def read_object(path: Path, hint: str = RESTORE) -> dict[str, Any]:
    """The JSON object in a file; UserError where it holds something else."""
    with refusing(path, hint):
        return _object(json.loads(read_bytes(path, hint)))


def read_yaml(path: Path, hint: str = RESTORE) -> Any:
    """The dictionary or list in a YAML file of plain data; interpolations stay as they are written."""
    from omegaconf import OmegaConf  # not for reports
    from omegaconf.errors import OmegaConfBaseException

    with refusing(path, hint):
        try:
            return OmegaConf.to_container(OmegaConf.load(io.StringIO(read_text(path, hint))))
        except OmegaConfBaseException as error:
            raise ValueError(str(error).partition("\n")[0]) from error


def _object(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")
    return found


def as_record(kind: type[Record], found: Any, place: Path | str, hint: str = RESTORE) -> Record:
    """A dataclass from the fields of a JSON object, by the types of its annotations; UserError that names the field
    which is missing or of another type. What the dataclass does not know is ignored."""
    with refusing(place, hint):
        values, kinds = _object(found), typing.get_type_hints(kind)
        values = {name: values[name] for name in kinds if name in values}
        for name, value in values.items():
            if is_dataclass(kinds[name]):
                values[name] = as_record(kinds[name], value, place, hint)
            elif not fits(value, kinds[name]):
                raise ValueError(f"has {name}={value!r:.60}, which is not of type {kinds[name]}, or below 0")
        try:
            return kind(**values)
        except TypeError as error:  # a field without a default is missing
            raise ValueError(str(error)) from error


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of the annotated type, with all that it holds. A whole number is a count, from 0, and it is
    taken where a number is asked for."""
    origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is types.UnionType:
        return any(fits(value, part) for part in parts)
    if origin in (list, dict) and parts:
        each = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and all(fits(one, parts[-1]) for one in each)
    if origin in (int, float):
        return type(value) in (int, origin) and (origin is float or value >= 0)
    return origin is Any or isinstance(value, origin)


class Kind(NamedTuple):
    """Files of one purpose: in words, a usual name, and a regular expression for the beginning."""

    words: str
    usual: str
    mark: bytes


STATUS = Kind("a status file", "run.status", rb'\{"state": "\w+", "step": \d+, "steps": \d+, "run_dir": "')
RUN_LOCK = Kind("the lock of a run", LOCK, rb'\Z|\{"host": ')


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
    rule, hint = "", "a new folder where you may write, or that of a run to continue"
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".megalite-", dir=existing))  # root may write anywhere, but not to /proc
        found = sorted(folder.iterdir()) if existing == folder and not (folder / RUN).exists() else []
        if names := [path.name for path in found if _is_of_others(path)]:
            rule = f"it holds {', '.join(names[:5])}, and is not the folder of a run (there is no {RUN})"
            hint = f"a new folder; if it was a run's, put its {RUN} back"
    except OSError as error:
        rule = f"{existing} cannot be written: {error.strerror}"
    if rule:
        yield Problem("run_dir", value, rule, hint, here=True)


def _is_of_others(path: Path) -> bool:
    """Whether a run would write over this, or among what it holds, in a folder without a run."""
    if path.is_dir():
        return path.name in _FOLDERS and any(path.iterdir())
    if path.name == LOCK:
        return bool(in_the_way(path, RUN_LOCK))
    return not path.name.startswith(".") and path.suffix not in _LOGS


def draft_of(path: Path) -> Path:
    """A name under which to write what then becomes `path`."""
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(6)}")


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

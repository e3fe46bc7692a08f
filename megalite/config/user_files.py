"""Reads files that a user or another program may have changed. Whatever is wrong with one is a refusal that names it.

A reader here reads regular files only, and never waits for a pipe.
"""

import io
import json
import os
import stat
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from megalite.errors.problems import NO_VALUE, Problem, UnavailableError, UserError
from megalite.errors.words import of_system

RESTORE = "restore it from a copy"
FAULTS = (OSError, ValueError, yaml.YAMLError, RecursionError, OverflowError)  # what reading and parsing raise

Record = TypeVar("Record")


@contextmanager
def refusing(place: Path | str, remedy: str = RESTORE) -> Iterator[None]:
    """Turns what goes wrong with a file inside into a UserError that names it. The words of a ValueError stand."""
    try:
        yield
    except FAULTS as error:
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        kind = UserError
        if isinstance(error, OSError) and error.errno:  # libraries raise an OSError without a number for a bad content
            kind, remedy = UnavailableError, of_system(error, remedy)
        rule = said if type(error) is ValueError else f"cannot be read: {said}"
        raise kind(Problem(str(place), NO_VALUE, rule, remedy, here=True)) from error


def absolute(path: str) -> str:
    """The path seen from the launch folder, with `~` expanded; symbolic links are kept as the user wrote them."""
    return os.path.abspath(os.path.expanduser(path))


def read_bytes(path: Path, remedy: str = RESTORE) -> bytes:
    """The content of a regular file; UserError where it is missing, unreadable, a folder or a device."""
    with refusing(path, remedy), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("is not a regular file")
        return file.read()


def read_text(path: Path, remedy: str = RESTORE) -> str:
    """The content as UTF-8 text."""
    with refusing(path, remedy):
        return read_bytes(path, remedy).decode()


def read_object(path: Path, remedy: str = RESTORE) -> dict[str, Any]:
    """The JSON object in a file; UserError where it holds something else."""
    with refusing(path, remedy):
        return _object(json.loads(read_text(path, remedy)))


def read_yaml(path: Path, remedy: str = RESTORE) -> Any:
    """The dictionary or list in a YAML file of plain data; interpolations stay as they are written."""
    from omegaconf import OmegaConf  # not for reports
    from omegaconf.errors import OmegaConfBaseException

    with refusing(path, remedy):
        try:
            return OmegaConf.to_container(OmegaConf.load(io.StringIO(read_text(path, remedy))))
        except OmegaConfBaseException as error:
            raise ValueError(str(error).partition("\n")[0]) from error


def _object(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")
    return found


def as_record(kind: type[Record], found: Any, place: Path | str, remedy: str = RESTORE) -> Record:
    """A dataclass from the fields of a JSON object, by the types of its annotations; UserError that names the field
    which is missing or of another type. What the dataclass does not know is ignored."""
    with refusing(place, remedy):
        known, kinds, record = _object(found), typing.get_type_hints(kind), dict[str, Any]()
        for name, wanted in ((name, kinds[name]) for name in kinds if name in known):
            value = known[name]
            if is_dataclass(wanted):
                record[name] = as_record(wanted, value, f"{place}: {name}", remedy)  # type: ignore[arg-type]
            elif fits(value, wanted):
                record[name] = value
            else:
                words = "a whole number from 0" if wanted is int else f"of type {getattr(wanted, '__name__', wanted)}"
                raise ValueError(f"has {name}={value!r:.60}, which is not {words}")
        try:
            return kind(**record)
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

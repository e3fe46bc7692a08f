"""Reads files that a user or another program may have changed. Whatever is wrong with one is a refusal that names it.

A reader here never blocks (a FIFO is not opened for waiting), reads regular files only, and turns the errors of the
system, the decoder and the parser into one UserError. `as_record` checks JSON fields against a dataclass.
"""

import json
import os
import stat
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from megalite.errors.problems import NO_VALUE, Problem, UserError

RESTORE = "restore it from a copy"
ALIASES = "once its aliases are written out"
YAML_NODES = 100_000  # with every alias written out: nested aliases can stand for billions
_WORDS = {int: "a whole number from 0", float: "a number", str: "text", bool: "true or false", dict: "an object"}

Record = TypeVar("Record")


def read_bytes(path: Path, remedy: str = RESTORE, *, follow_links: bool = True) -> bytes:
    """The content of a regular file; UserError where it is missing, unreadable, a folder or a device."""
    with refusing(path, remedy):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW))
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("is not a regular file")
            return file.read()


def read_text(path: Path, remedy: str = RESTORE) -> str:
    """The same as UTF-8 text."""
    content = read_bytes(path, remedy)
    with refusing(path, remedy):
        return content.decode()


def read_json(path: Path, remedy: str = RESTORE) -> Any:
    """The value in a JSON file."""
    content = read_bytes(path, remedy)
    with refusing(path, remedy):
        return json.loads(content)


def read_object(path: Path, remedy: str = RESTORE) -> dict[str, Any]:
    """The JSON object in a file; UserError where it holds something else."""
    found = read_json(path, remedy)
    with refusing(path, remedy):
        if not isinstance(found, dict):
            raise ValueError("is not a JSON object")
    return found


def read_yaml(path: Path, remedy: str = RESTORE) -> Any:
    """The value in a YAML file of plain data; aliases may not multiply without bound."""
    content = read_bytes(path, remedy)
    with refusing(path, remedy):
        tree = yaml.compose(content, Loader=yaml.SafeLoader)
        if _expanded_size(tree, {}) > YAML_NODES:
            raise ValueError(f"stands for more than {YAML_NODES:,} values {ALIASES}")
        _refuse_repeated_keys(tree)
        return yaml.load(content, Loader=yaml.SafeLoader)


def as_record(kind: type[Record], found: Any, place: Path | str, remedy: str = RESTORE) -> Record:
    """A dataclass from the fields of a JSON object; UserError that names the field which is missing or of another type.

    Types are checked as annotated; whole numbers are counts, so none may be negative. Fields with a default may be
    missing, fields that the dataclass lacks are ignored.
    """
    with refusing(place, remedy):
        if not isinstance(found, Mapping):
            raise ValueError("is not a JSON object")
        values, kinds = {}, typing.get_type_hints(kind)
        for field in fields(kind):  # type: ignore[arg-type]
            value, wanted = found.get(field.name), kinds[field.name]
            if field.name in found and isinstance(wanted, type) and is_dataclass(wanted):
                values[field.name] = as_record(wanted, value, f"{place}: {field.name}", remedy)
            elif field.name in found:
                values[field.name] = _checked(value, wanted, field.name)
            elif field.default is MISSING and field.default_factory is MISSING:
                raise ValueError(f"lacks {field.name!r}")
        return kind(**values)


@contextmanager
def refusing(place: Path | str, remedy: str = RESTORE) -> Iterator[None]:
    """Turns what goes wrong with a file inside into a UserError that names it."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise _refusal(place, f"cannot be read: {error.strerror or error}", remedy) from error
    except UnicodeDecodeError as error:
        raise _refusal(place, f"is not UTF-8 text (byte {error.start:,})", remedy) from error
    except json.JSONDecodeError as error:
        raise _refusal(place, f"is not JSON: {error}", remedy) from error
    except yaml.YAMLError as error:
        raise _refusal(place, f"is not YAML: {' '.join(str(error).split())}", remedy) from error
    except RecursionError as error:
        raise _refusal(place, "is nested too deeply", remedy) from error
    except (ValueError, OverflowError) as error:
        raise _refusal(place, str(error), remedy) from error


def _refusal(place: Path | str, rule: str, remedy: str) -> UserError:
    return UserError(Problem(str(place), NO_VALUE, rule, remedy, here=True))


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


def _checked(value: Any, kind: Any, name: str) -> Any:
    """The value if it is of the annotated type; a whole number becomes a number where one is asked for."""
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if not fits(value, kind):
        plain = [typing.get_origin(each) or each for each in allowed]
        words = " or ".join("null" if each is types.NoneType else _WORDS.get(each, each.__name__) for each in plain)
        raise ValueError(f"has {name}={value!r:.60}, which is not {words}")
    return float(value) if float in allowed and type(value) is int else value


def _expanded_size(node: Any, known: dict[int, float]) -> float:
    """How many nodes there are once every alias is written out; infinite for one that holds itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")  # met again below itself: it holds itself
        known[id(node)] = 1 + sum(_expanded_size(child, known) for child in _children(node))
    return known[id(node)]


def _refuse_repeated_keys(node: Any) -> None:
    """A loader would take the last of them without a word."""
    if isinstance(node, yaml.MappingNode):
        keys = [str(key.value) for key, _ in node.value]
        if repeated := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"gives {', '.join(repeated)} more than once")
    for child in _children(node):
        _refuse_repeated_keys(child)


def _children(node: Any) -> list[Any]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []

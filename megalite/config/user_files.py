"""Reads files that a user or another program may have changed. Whatever is wrong with one is a refusal that names it.

A reader here never blocks (a FIFO is not opened for waiting), reads regular files only, and turns the errors of the
system, the decoder and the parser into one UserError. `as_record` checks JSON fields against a dataclass.
"""

import json
import math
import os
import re
import stat
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml  # type: ignore[import-untyped]

from megalite.errors.problems import NO_VALUE, Problem, UnavailableError, UserError
from megalite.errors.remedies import of_system

RESTORE = "restore it from a copy"
MOST_VALUES = 100_000  # of a YAML file
FAULTS: dict[type[Exception], str] = {  # what goes wrong with files, in words
    OSError: "cannot be read: ",
    UnicodeDecodeError: "is not UTF-8 text: ",
    json.JSONDecodeError: "is not JSON: ",
    yaml.YAMLError: "is not YAML: ",
    RecursionError: "is nested too deeply: ",
    ValueError: "",
    OverflowError: "",
}

Record = TypeVar("Record")
Parsed = TypeVar("Parsed")


@contextmanager
def refusing(place: Path | str, remedy: str = RESTORE) -> Iterator[None]:
    """Turns what goes wrong with a file inside into a UserError that names it."""
    try:
        yield
    except tuple(FAULTS) as error:
        rule = next(words for kind, words in FAULTS.items() if isinstance(error, kind))
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        kind = UserError
        if isinstance(error, OSError) and error.errno:  # libraries raise an OSError without a number for a bad content
            kind, remedy = UnavailableError, of_system(error, remedy)
        raise kind(Problem(str(place), NO_VALUE, rule + said, remedy, here=True)) from error


def read_bytes(path: Path, remedy: str = RESTORE, *, follow_links: bool = True) -> bytes:
    """The content of a regular file; UserError where it is missing, unreadable, a folder or a device."""
    with refusing(path, remedy):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW))
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("is not a regular file")
            return file.read()


def absolute(path: str) -> str:
    """The path seen from the launch folder, with `~` expanded; symbolic links are kept as the user wrote them."""
    return os.path.abspath(os.path.expanduser(path))


def _parsed(path: Path, remedy: str, parse: Callable[[bytes], Parsed]) -> Parsed:
    content = read_bytes(path, remedy)
    with refusing(path, remedy):
        return parse(content)


def read_text(path: Path, remedy: str = RESTORE) -> str:
    """The content as UTF-8 text."""
    return _parsed(path, remedy, bytes.decode)


def read_json(path: Path, remedy: str = RESTORE) -> Any:
    """The value in a JSON file."""
    return _parsed(path, remedy, json.loads)


def read_object(path: Path, remedy: str = RESTORE) -> dict[str, Any]:
    """The JSON object in a file; UserError where it holds something else."""
    return _parsed(path, remedy, lambda content: _object(json.loads(content)))


def read_yaml(path: Path, remedy: str = RESTORE) -> Any:
    """The value in a YAML file of plain data, read as Hydra does; UserError where its aliases stand for more values
    than anyone writes: nested ones double with every line."""
    return _parsed(path, remedy, _plain)


def _object(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")
    return found


class _YamlLoader(yaml.SafeLoader):
    """Plain data as Hydra reads it: no key stands twice, `1e-4` is a number, a date is text."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """The mapping of a node; ConstructorError for a key that stands twice."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key, times in Counter(keys).items() if times > 1]:
            raise yaml.constructor.ConstructorError(problem=f"duplicate key {twice[0]}", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)


def _plain(content: bytes) -> Any:
    if explodes(content):
        raise ValueError(f"stands for more than {MOST_VALUES:,} values (aliases of aliases)")
    return yaml.load(content, Loader=_YamlLoader)


def explodes(content: bytes) -> bool:
    """Whether YAML text stands for more values than anyone writes, with those that its aliases repeat."""
    known: dict[yaml.Node, float] = {}

    def count(node: yaml.Node) -> float:
        if node not in known:
            known[node] = math.inf  # until it is counted: a node may hold itself
            parts = chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
            known[node] = 1 + sum(map(count, () if isinstance(node, yaml.ScalarNode) else parts))
        return known[node]

    with suppress(yaml.YAMLError, UnicodeDecodeError, RecursionError):  # told by whoever loads it
        node = yaml.compose(content, Loader=_YamlLoader)
        return node is not None and count(node) > MOST_VALUES
    return False


def as_record(kind: type[Record], found: Any, place: Path | str, remedy: str = RESTORE) -> Record:
    """A dataclass from the fields of a JSON object; UserError that names the field which is missing or of another type.

    Types are checked as annotated, by `fits`. Fields with a default may be missing, fields that the dataclass lacks are
    ignored.
    """
    with refusing(place, remedy):
        _object(found)
        values, kinds = {}, typing.get_type_hints(kind)
        for field in fields(kind):  # type: ignore[arg-type]
            name, wanted = field.name, kinds[field.name]
            if name not in found:
                if field.default is MISSING and field.default_factory is MISSING:
                    raise ValueError(f"lacks {name!r}")
                continue
            values[name] = found[name]
            if isinstance(wanted, type) and is_dataclass(wanted):
                values[name] = as_record(wanted, found[name], f"{place}: {name}", remedy)
            elif not fits(found[name], wanted):
                words = "a whole number from 0" if wanted is int else f"of type {getattr(wanted, '__name__', wanted)}"
                raise ValueError(f"has {name}={found[name]!r:.60}, which is not {words}")
        return kind(**values)


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

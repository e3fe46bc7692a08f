"""The schema as one flat table: dotted name -> type, default, meaning, choices and bounds.

Whatever speaks about settings in general (the command line, the rules, `conf/`, the docs) reads this table, so a new
field of `schema.py` is known everywhere at once. A group is a field of `Config` that is a dataclass; a dataclass inside
a group adds a word to the names of its settings (`model.moe.top_k`).
Users, files and checkpoints know a setting by its name, which Python may not allow for a field (`checkpoint.async`):
a config comes from them by `flat` and goes to them by `as_plain`, and only this file knows both words.
"""

import types
import typing
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any

from megalite.config.schema import Config

OPEN = (None, "auto")  # values of settings that are left to be derived
DERIVED = "derived"  # key of a run's config.yaml: the settings in it that nobody gave
TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[int]: "a list of whole numbers",
    list[float]: "a list of numbers",
    list[str]: "a list of words",
    Any: "text or a list of it",
}
YES, NO = ("true", "yes", "y", "on", "1"), ("false", "no", "n", "off", "0")


@dataclass(frozen=True)
class Setting:
    """One setting that a user can override."""

    name: str  # dotted: train.steps
    field: str  # from the config on, dotted: model.moe.top_k
    group: str  # the part before the first dot; empty for the settings of the run itself
    kind: Any  # a key of TYPE_WORDS
    nullable: bool
    default: Any
    meaning: str
    choices: tuple[str, ...]
    limits: dict[str, float]  # by at_least, above, at_most, below

    @property
    def leaf(self) -> str:
        """The name inside its group."""
        return self.name.removeprefix(f"{self.group}.")

    @property
    def type_words(self) -> str:
        """The type as a person says it: `a whole number or null`."""
        words = TYPE_WORDS[self.kind]
        return f"{words} or null" if self.nullable and self.kind is not Any else words

    @property
    def limit_words(self) -> str:
        """The bounds as a person says them: `at least 0, below 1`; empty where there are none."""
        return ", ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in self.limits.items())

    @property
    def words(self) -> str:
        """Type, choices and bounds in words."""
        if self.choices:
            return " | ".join((*self.choices, "null") if self.nullable else self.choices)
        return ", ".join(words for words in (self.type_words.removeprefix("a "), self.limit_words) if words)

    def typed(self, value: Any) -> Any:
        """A value from YAML or a command line as this setting's type; ValueError or OverflowError for another type."""
        if value is None or (value == "auto" and self.kind is bool):  # an open choice, as other settings call it
            if not self.nullable:
                raise ValueError(value)
            return None
        if self.kind is Any:
            return [_single(Any, one) for one in value] if isinstance(value, list) else _single(Any, value)
        if typing.get_origin(self.kind) is not list:
            return _single(self.kind, value)
        if not isinstance(value, list):
            raise ValueError(value)
        return [_single(typing.get_args(self.kind)[0], one) for one in value]


def _single(kind: Any, value: Any) -> Any:
    if kind is bool and (word := str(value).lower()) in (*YES, *NO):
        return word in YES
    number = kind in (int, float)
    if value is None or isinstance(value, list | dict) or kind is bool or (number and isinstance(value, bool)):
        raise ValueError(value)
    if kind is int and isinstance(value, float):
        raise ValueError(value)
    return value if kind is Any else kind(value)


def _settings(schema: type, path: str = "") -> Iterator[Setting]:
    """All settings of a dataclass and of the dataclasses in it; `path` is where it is in the config."""
    for field in fields(schema):
        if field.metadata:
            yield _setting(path, field)
        elif is_dataclass(field.type):
            yield from _settings(field.type, f"{path}{field.name}.")  # type: ignore[arg-type]


def _setting(path: str, field: "Field[Any]") -> Setting:
    members = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
    (kind,) = (member for member in members if member is not types.NoneType)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    about = dict(field.metadata)
    name, group = path + (about.pop("name") or field.name), path.partition(".")[0]
    return Setting(name, path + field.name, group, kind, default is None or len(members) > 1, default, **about)


GROUPS: dict[str, type] = {field.name: field.type for field in fields(Config) if is_dataclass(field.type)}  # type: ignore[misc]
EXPERIMENT = "experiment"  # the folder of conf/ whose files are no group of settings: each may set any of them
SETTINGS = {setting.name: setting for setting in sorted(_settings(Config), key=lambda setting: setting.group != "")}


def value_of(config: Config, name: str) -> Any:
    """The value of a setting by its dotted name."""
    return attrgetter(SETTINGS[name].field)(config)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy in which the settings, by their dotted names, hold these values."""
    changed: Config = _replaced(config, {SETTINGS[name].field: value for name, value in values.items()})
    return changed


def _replaced(part: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with these values of its fields, dotted where they are inside a field."""
    inner: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        first, _, rest = name.partition(".")
        inner.setdefault(first, {})[rest] = value
    changes = {
        name: within[""] if "" in within else _replaced(getattr(part, name), within) for name, within in inner.items()
    }
    return replace(part, **changes)


def as_plain(config: Config) -> dict[str, Any]:
    """All settings as nested dictionaries by their names: what is written to files and compared with them."""
    return nested({name: deepcopy(value_of(config, name)) for name in SETTINGS})


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dictionaries in dictionaries, from values by dotted names."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split(".")
        part = plain
        for group in groups:
            part = part.setdefault(group, {})
        part[last] = value
    return plain


def flat(plain: Mapping[Any, Any]) -> dict[str, Any]:
    """Names and values of the settings in nested dictionaries."""
    found = leaves(plain)
    return {name: found[name] for name in SETTINGS if name in found}


def leaves(nested: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names and values of nested dictionaries, whether they are settings or not; a key with a dot is quoted."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{repr(key) if '.' in str(key) else key}"
        found |= leaves(value, f"{name}.") if isinstance(value, dict) and name not in SETTINGS else {name: value}
    return found


def yaml_value(value: Any) -> str:
    """The value as YAML and Hydra's command line take it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and "e" in repr(value):  # YAML 1.1 reads 1e-08 as text; 1.0e-8 is a number everywhere
        mantissa, _, exponent = repr(value).partition("e")
        return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent)}"
    if isinstance(value, list):
        return "[" + ",".join(yaml_value(item) for item in value) + "]"
    return str(value)

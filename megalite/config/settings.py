"""The schema as one flat table: dotted name -> type, default, meaning, choices and bounds.

The command line, the rules, `conf/` and the docs read this table. A group is a field of `Config` that is a dataclass; a
dataclass inside a group adds a word (`model.moe.top_k`). Users know a setting by its name, which Python may not allow
for a field (`checkpoint.async`): only this file knows both words.
"""

import json
import types
import typing
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
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
    list[list[float]]: "a list of lists of numbers",
    list[str]: "a list of words",
    list[dict[str, Any]]: "a list of groups",
    dict[str, Any]: "names with paths",
    Any: "text or a list of it",
}


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
        """The name inside the group."""
        return self.name.removeprefix(f"{self.group}.")

    @property
    def type_words(self) -> str:
        """The type as a person says it: `a whole number or null`."""
        return TYPE_WORDS[self.kind] + " or null" * (self.nullable and self.kind is not Any)

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

    @property
    def as_default(self) -> str:
        """The override that gives the default."""
        return f"{self.name}={yaml_value(self.default)}"


def _settings(schema: type, path: str = "") -> Iterator[Setting]:
    """All settings of a dataclass and of the dataclasses in it; `path` is where it is in the config."""
    for field in fields(schema):
        if is_dataclass(field.type):
            yield from _settings(field.type, f"{path}{field.name}.")  # type: ignore[arg-type]
        elif field.metadata:
            members = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
            (kind,) = (member for member in members if member is not types.NoneType)
            default = field.default if field.default_factory is MISSING else field.default_factory()
            about = dict(field.metadata)
            name, nullable = path + (about.pop("name") or field.name), default is None or len(members) > 1
            yield Setting(name, path + field.name, path.partition(".")[0], kind, nullable, default, **about)


GROUPS: dict[str, type] = {field.name: field.type for field in fields(Config) if is_dataclass(field.type)}  # type: ignore[misc]
EXPERIMENT = "experiment"  # the folder of conf/ whose files are no group of settings: each may set any of them
SETTINGS = {setting.name: setting for setting in sorted(_settings(Config), key=lambda setting: setting.group != "")}


def value_of(config: Config, name: str) -> Any:
    """The value of a setting by its dotted name."""
    return attrgetter(SETTINGS[name].field)(config)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy in which the settings, by their dotted names, hold these values."""
    changed: Config = _replaced(config, nested({SETTINGS[name].field: value for name, value in values.items()}))
    return changed


def _replaced(part: Any, values: Mapping[str, Any]) -> Any:
    groups = {name: _replaced(group, values[name]) for name in values if is_dataclass(group := getattr(part, name))}
    return replace(part, **{**values, **groups})


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


def leaves(nested: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names and values of nested dictionaries, whether they are settings or not; a key with a dot is quoted."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{repr(key) if '.' in str(key) else key}"
        found |= leaves(value, f"{name}.") if isinstance(value, dict) and name not in SETTINGS else {name: value}
    return found


def yaml_value(value: Any) -> str:
    """The value as YAML and Hydra's command line take it."""
    if isinstance(value, list):
        return f"[{','.join(map(yaml_value, value))}]"
    return value if isinstance(value, str) else json.dumps(value)

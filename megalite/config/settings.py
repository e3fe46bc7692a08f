"""The schema as one flat table: dotted name -> type, default, meaning, choices and bounds.

Whatever speaks about settings in general (the checks of the command line, the bounds, `conf/`, the docs) reads this
table, so a new field of `schema.py` is known everywhere at once. A group is a field of `Config` that is a dataclass; a
dataclass inside of one adds a word to the names of its settings (`model.moe.top_k`).
Users, files and checkpoints know a setting by its name, which Python may not allow for a field (`checkpoint.async`):
a config comes from them by `flat` and goes to them by `as_plain`, and only this file knows both words.
"""

import types
import typing
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any, Dict  # noqa: UP035  # OmegaConf knows it by this name alone

from omegaconf import DictConfig, OmegaConf

from megalite.config.schema import Config

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


@dataclass(frozen=True)
class Setting:
    """One setting that a user can override."""

    name: str  # dotted: train.steps
    field: str  # of the group's dataclass; dotted inside of another one: moe.top_k
    group: str  # the part before the first dot; empty for the settings of the run itself
    kind: Any  # a key of TYPE_WORDS
    nullable: bool
    default: Any
    meaning: str
    choices: tuple[str, ...]
    limits: dict[str, float]  # of at_least, above, at_most, below

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


def _settings(group: str, schema: type, inner: str = "") -> Iterator[Setting]:
    """All settings of a group, of the dataclasses inside of it too."""
    for field in fields(schema):
        if field.metadata:
            yield _setting(group, inner, field)
        elif group and is_dataclass(field.type):
            yield from _settings(group, field.type, f"{inner}{field.name}.")  # type: ignore[arg-type]


def _setting(group: str, inner: str, field: "Field[Any]") -> Setting:
    members = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
    (kind,) = (member for member in members if member is not types.NoneType)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    about = dict(field.metadata)
    leaf = inner + (about.pop("name") or field.name)
    name, nullable = f"{group}.{leaf}" if group else leaf, kind is Any or len(members) > 1
    return Setting(name, inner + field.name, group, kind, nullable, default, **about)


GROUPS: dict[str, type] = {field.name: field.type for field in fields(Config) if is_dataclass(field.type)}  # type: ignore[misc]
EXPERIMENT = "experiment"  # the folder of conf/ whose files are no group of settings: each may set any of them
SETTINGS: dict[str, Setting] = {
    setting.name: setting for group, schema in {"": Config, **GROUPS}.items() for setting in _settings(group, schema)
}


def value_of(config: Config, name: str) -> Any:
    """The value of a setting by its dotted name."""
    setting = SETTINGS[name]
    return attrgetter(f"{setting.group}.{setting.field}" if setting.group else setting.field)(config)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy in which the settings, by their dotted names, hold these values."""
    fields = {
        f"{setting.group}.{setting.field}" if setting.group else setting.field: value
        for setting, value in ((SETTINGS[name], value) for name, value in values.items())
    }
    changed: Config = _replaced(config, fields)
    return changed


def _replaced(part: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with these values of its fields, dotted where they are inside of a field."""
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
    plain: dict[str, Any] = {}
    for name in SETTINGS:
        *groups, last = name.split(".")
        part = plain
        for group in groups:
            part = part.setdefault(group, {})
        part[last] = deepcopy(value_of(config, name))
    return plain


def flat(plain: Mapping[Any, Any]) -> dict[str, Any]:
    """Name and value of the settings that nested dictionaries hold."""
    found = {}
    for name in SETTINGS:
        *groups, last = name.split(".")
        part: Any = plain
        for group in groups:
            part = part.get(group) if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and last in part:
            found[name] = part[last]
    return found


def leaves(nested: Mapping[Any, Any]) -> dict[str, Any]:
    """Name and value of all that nested dictionaries hold, of what is no setting too."""
    pending = {str(name): value for name, value in nested.items()}
    while groups := [name for name, value in pending.items() if isinstance(value, dict) and name not in SETTINGS]:
        pending.update({f"{groups[0]}.{leaf}": value for leaf, value in pending.pop(groups[0]).items()})
    return pending


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


def typed_settings() -> DictConfig:
    """Every setting with its default, as the tree that OmegaConf checks keys and values against: what is no setting,
    and values of another type, are refused."""
    return deepcopy(_typed_settings())


@cache
def _typed_settings() -> DictConfig:
    typed, tree = OmegaConf.structured(Config), dict[str, Any]()
    for setting in SETTINGS.values():
        *groups, last = setting.name.split(".")
        node, part = typed, tree
        for group in groups:
            node, part = node[group], part.setdefault(group, {})
        part[last] = node._get_node(setting.field.rpartition(".")[2])

    def checked(part: dict[str, Any]) -> dict[str, Any]:
        """With every dictionary inside as a tree of its own."""
        inner = {name: value for name, value in part.items() if isinstance(value, dict)}
        return part | {
            name: DictConfig(checked(value), ref_type=Dict[str, Any], key_type=str, is_optional=False)  # noqa: UP006
            for name, value in inner.items()
        }

    return DictConfig(checked(tree), flags={"struct": True})  # the groups inherit the flag

"""The schema as one flat table: dotted name -> type, default, meaning, choices and bounds.

Whatever speaks about settings in general (the checks of the command line, the bounds, `conf/`, the docs) reads this
table, so a new field of `schema.py` is known everywhere at once. A group is a field of `Config` that is a dataclass.
Users, files and checkpoints know a setting by its name, which Python may not allow for a field (`checkpoint.async`):
a config comes from them by `from_plain` and goes to them by `as_plain`, and only this file knows both words.
"""

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass, replace
from typing import Any

from megalite.config.schema import Config

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
    field: str  # of the group's dataclass
    group: str  # the part before the dot; empty for the settings of the run itself
    kind: Any  # a key of TYPE_WORDS
    nullable: bool
    default: Any
    meaning: str
    choices: tuple[str, ...]
    limits: dict[str, float]  # of at_least, above, at_most, below

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def type_words(self) -> str:
        """The type as a person says it: `a whole number or null`."""
        words = TYPE_WORDS[self.kind]
        return f"{words} or null" if self.nullable and self.kind is not Any else words

    @property
    def limit_words(self) -> str:
        """The bounds as a person says them: `at least 0, below 1`; empty where there are none."""
        return ", ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in self.limits.items())


def groups(schema: type = Config) -> dict[str, type]:
    """Name and dataclass of every group, in the order of the schema."""
    return {
        field.name: field.type for field in fields(schema) if isinstance(field.type, type) and is_dataclass(field.type)
    }


def _setting(group: str, field: "Field[Any]") -> Setting:
    kind: Any = field.type
    nullable = kind is Any
    if isinstance(kind, types.UnionType):
        members = typing.get_args(kind)
        nullable = types.NoneType in members
        (kind,) = (member for member in members if member is not types.NoneType)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    about = field.metadata
    leaf = about["name"] or field.name
    name = f"{group}.{leaf}" if group else leaf
    return Setting(
        name, field.name, group, kind, nullable, default, about["meaning"], about["choices"], about["limits"]
    )


def _settings() -> Iterator[Setting]:
    inner = groups()
    yield from (_setting("", field) for field in fields(Config) if "meaning" in field.metadata)
    for group, schema in inner.items():
        yield from (_setting(group, field) for field in fields(schema))


GROUPS: dict[str, type] = groups()
EXPERIMENT = "experiment"  # the folder of conf/ whose files are no group of settings: each may set any of them
SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _settings()}


def value_of(config: Config, name: str) -> Any:
    """The value of a setting by its dotted name."""
    setting = SETTINGS[name]
    return getattr(getattr(config, setting.group) if setting.group else config, setting.field)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy in which the settings, by their dotted names, hold these values."""
    changed = config
    for name, value in values.items():
        setting = SETTINGS[name]
        part = {setting.field: value}
        if setting.group:
            part = {setting.group: replace(getattr(changed, setting.group), **part)}
        changed = replace(changed, **part)
    return changed


def as_plain(config: Config) -> dict[str, Any]:
    """All settings as nested dictionaries by their names: what is written to files and compared with them."""
    fields_ = asdict(config)
    return {setting.leaf: fields_[setting.field] for setting in SETTINGS.values() if not setting.group} | {
        group: {one.leaf: fields_[group][one.field] for one in SETTINGS.values() if one.group == group}
        for group in GROUPS
    }


def from_plain(plain: Mapping[Any, Any]) -> Config:
    """The config of nested dictionaries that name every setting."""
    own = {setting.field: plain[setting.leaf] for setting in SETTINGS.values() if not setting.group}
    parts = {
        group: schema(**{one.field: plain[group][one.leaf] for one in SETTINGS.values() if one.group == group})
        for group, schema in GROUPS.items()
    }
    return Config(**own, **parts)


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

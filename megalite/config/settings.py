"""The schema as one flat table: dotted name -> type, default, meaning, choices and bounds.

Whatever speaks about settings in general (the checks of the command line, the bounds, `conf/`, the docs) reads this
table, so a new field of `schema.py` is known everywhere at once. A group is a field of `Config` that is a dataclass.
Users, files and checkpoints know a setting by its name, which Python may not allow for a field (`checkpoint.async`):
a config comes from them by `flat` and goes to them by `as_plain`, and only this file knows both words.
"""

import types
import typing
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from typing import Any, Dict, List  # noqa: UP035  # OmegaConf knows containers by these names alone

from omegaconf import AnyNode, BooleanNode, DictConfig, FloatNode, IntegerNode, ListConfig, StringNode

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


GROUPS: dict[str, type] = {field.name: field.type for field in fields(Config) if is_dataclass(field.type)}  # type: ignore[misc]
EXPERIMENT = "experiment"  # the folder of conf/ whose files are no group of settings: each may set any of them
SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for group, schema in {"": Config, **GROUPS}.items()
    for setting in (_setting(group, field) for field in fields(schema) if field.metadata)
}


def value_of(config: Config, name: str) -> Any:
    """The value of a setting by its dotted name."""
    setting = SETTINGS[name]
    return getattr(getattr(config, setting.group) if setting.group else config, setting.field)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy in which the settings, by their dotted names, hold these values."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        parts.setdefault(SETTINGS[name].group, {})[SETTINGS[name].field] = value
    own = parts.pop("", {})
    return replace(config, **own, **{group: replace(getattr(config, group), **part) for group, part in parts.items()})


def as_plain(config: Config) -> dict[str, Any]:
    """All settings as nested dictionaries by their names: what is written to files and compared with them."""
    plain: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        part = plain.setdefault(setting.group, {}) if setting.group else plain
        part[setting.leaf] = deepcopy(value_of(config, name))
    return plain


def flat(plain: Mapping[Any, Any]) -> dict[str, Any]:
    """Name and value of the settings that nested dictionaries hold."""
    parts = {name: plain.get(setting.group) if setting.group else plain for name, setting in SETTINGS.items()}
    return {
        name: part[SETTINGS[name].leaf]
        for name, part in parts.items()
        if isinstance(part, Mapping) and SETTINGS[name].leaf in part
    }


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
    tree: dict[str, Any] = {group: {} for group in GROUPS}
    for setting in SETTINGS.values():
        part = tree[setting.group] if setting.group else tree
        part[setting.leaf] = _typed(setting)
    for group in GROUPS:
        tree[group] = DictConfig(tree[group], ref_type=Dict[str, Any], key_type=str, is_optional=False)  # noqa: UP006
    return DictConfig(tree, flags={"struct": True})  # the groups inherit the flag


def _typed(setting: Setting) -> Any:
    scalars: dict[Any, Any] = {int: IntegerNode, float: FloatNode, bool: BooleanNode, str: StringNode}
    if setting.kind is Any:
        return AnyNode(setting.default)
    if setting.kind in scalars:
        return scalars[setting.kind](setting.default, is_optional=setting.nullable)
    (element,) = typing.get_args(setting.kind)
    kinds = {"ref_type": List[element], "element_type": element}  # type: ignore[valid-type]  # noqa: UP006
    return ListConfig(setting.default, is_optional=setting.nullable, **kinds)

"""The settings as the typed tree that Hydra and OmegaConf check every key and value against, by their public names.

Made from the table in settings.py and not from the dataclasses: a field cannot have every name that a setting can.
"""

from typing import Any, Dict, List  # noqa: UP035  # OmegaConf knows containers by these names alone

from omegaconf import AnyNode, BooleanNode, DictConfig, FloatNode, IntegerNode, ListConfig, StringNode

from megalite.config.settings import GROUPS, SETTINGS, Setting

SCALARS: dict[Any, Any] = {int: IntegerNode, float: FloatNode, bool: BooleanNode, str: StringNode}
LISTS = {list[int]: (List[int], int), list[float]: (List[float], float), list[str]: (List[str], str)}  # noqa: UP006


def typed_settings() -> DictConfig:
    """Every setting with its default. Keys that are no settings, and values of another type, are refused."""
    tree: dict[str, Any] = {group: {} for group in GROUPS}
    for setting in SETTINGS.values():
        part = tree[setting.group] if setting.group else tree
        part[setting.leaf] = _node(setting)
    nodes = {key: _group(inner) if key in GROUPS else inner for key, inner in tree.items()}
    return DictConfig(nodes, flags={"struct": True})  # the groups inherit the flag


def _group(entries: dict[str, Any]) -> DictConfig:
    anything = Dict[str, Any]  # noqa: UP006
    return DictConfig(entries, ref_type=anything, key_type=str, is_optional=False)


def _node(setting: Setting) -> Any:
    if setting.kind is Any:
        return AnyNode(setting.default)
    if setting.kind in LISTS:
        reference, element = LISTS[setting.kind]
        return ListConfig(setting.default, ref_type=reference, element_type=element, is_optional=setting.nullable)
    return SCALARS[setting.kind](setting.default, is_optional=setting.nullable)

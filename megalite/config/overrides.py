"""Reads overrides one by one: can it be read, is there such a setting or choice, is its value of the right type?

Hydra would stop at the first that is wrong. Here each is refused by itself, with what would work.
"""

import re
from collections.abc import Iterator
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalite.config.bounds import outside
from megalite.config.secrecy import ADVICE, HIDDEN, secret_override, secret_value
from megalite.config.settings import GROUPS, SETTINGS, leaves, typed_settings, yaml_value
from megalite.config.suggest import INSTEAD, nearest_setting
from megalite.errors.problems import LONGEST_SHOWN, NO_VALUE, Problem, UserError, shortened
from megalite.errors.remedies import nearest


def read_override(text: str, loader: ConfigLoader) -> Override:
    """The override as Hydra reads it (a `+` means nothing here); UserError where it is none, or an unknown choice."""
    problem = None
    text = text.lstrip("+")
    name, equals, given = text.partition("=")
    if secret_override(text):
        shown = name if equals and not secret_value(name) else HIDDEN
        problem = Problem(shown, HIDDEN, "looks like a secret", ADVICE)
    elif name.startswith("-"):
        remedy = f"settings are written name=value, without dashes: {text.lstrip('-')}; see --help"
        problem = Problem(name, given, "unknown option", remedy)
    elif name.startswith("~"):
        problem = Problem(name, NO_VALUE, "settings cannot be removed", "give it another value, or null")
    elif not equals:
        remedy = f"write {nearest_setting(name) or 'model'}=VALUE; overrides look like train.steps=100"
        problem = Problem(shortened(name), NO_VALUE, "not an override: there is no '='", remedy)
    elif name.startswith(("hydra.", "hydra/")):
        remedy = "leave it out; with --multirun, hydra.sweep, hydra/sweeper and hydra/launcher count"
        problem = Problem(name, given, "has no effect: Hydra composes the settings and does nothing else", remedy)
    if problem:
        raise UserError(problem)
    try:
        override = OverridesParser.create().parse_override(text)
        value = override.value()
    except (HydraException, ValueError, RecursionError) as error:  # too many digits, too many brackets
        rule = f"cannot be read ({str(error).strip().splitlines()[0][:LONGEST_SHOWN]})"
        remedy = (
            f"""quotes around texts with signs or blanks: '{name}="a=b"', in a list around each: '{name}=["a b"]'"""
        )
        raise UserError(Problem(name, shortened(given), rule, remedy)) from error
    if override.is_sweep_override():
        remedy = f"for a list {name}=[{given}], for one text quotes around it, for a run per value --multirun"
        raise UserError(Problem(name, given, "several values", remedy))
    choices = choices_of(override, loader)
    for one in value if isinstance(value, list) else [value]:
        if choices and one not in choices:
            raise UserError(_unknown_choice(name, one, choices))
    return override


def choices_of(override: Override, loader: ConfigLoader) -> list[str]:
    """The files of the group of which it chooses one, those of --config-dir included; empty where it sets a value."""
    name = override.get_key_element()
    return [] if "." in name or isinstance(override.value(), dict) else loader.get_group_options(name)


def assign(tree: DictConfig, override: Override) -> Iterator[Problem]:
    """Sets in the tree what the override says; the problems of what is no setting or of another type."""
    for name, value in named_leaves(override).items():
        setting = SETTINGS.get(name)
        if setting is None:
            yield unknown(name, value)
            continue
        try:
            if setting.kind is bool and isinstance(value, int) and value not in (0, 1):  # to OmegaConf, 2 is true
                raise OverflowError
            open_choice = setting.kind is bool and setting.nullable and value == "auto"  # as other settings call it
            OmegaConf.update(tree, name, None if open_choice else value, merge=True)
        except (OmegaConfBaseException, OverflowError):  # the latter: 400 digits, and no point among them
            whole = setting.kind is int and isinstance(value, float) and value.is_integer() and takes(name, int(value))
            remedy = f"{name}={yaml_value(int(value) if whole else setting.default)}"
            yield Problem(name, value, f"must be {setting.type_words}", remedy)


def named_leaves(override: Override) -> dict[str, Any]:
    """Names and values: `model={norm: rmsnorm}` sets what `model.norm=rmsnorm` sets."""
    return leaves({override.get_key_element(): override.value()})


def settings_named(override: Override) -> set[str]:
    """The settings that an override speaks of: all of a group whose file it chooses, every one for a recipe."""
    name = override.get_key_element()
    if name in SETTINGS or isinstance(override.value(), dict):  # of which {} names none
        return named_leaves(override).keys() & SETTINGS.keys()
    return {setting.name for setting in SETTINGS.values() if setting.group == name or name not in GROUPS}


def as_override(value: Any) -> str:
    """The value as Hydra's command line reads it, so that it comes back as it is."""
    if isinstance(value, list):
        return "[" + ",".join(as_override(item) for item in value) + "]"
    if value is None or isinstance(value, bool | int | float):
        return yaml_value(value)
    return QuotedString(str(value).replace("${", "\\${"), Quote.single).with_quotes()


def unknown(name: str, value: Any) -> Problem:
    """The problem of what is no setting."""
    return Problem(name, value, "unknown setting", _meant(name, value))


def _unknown_choice(group: str, choice: Any, choices: list[str]) -> Problem:
    near = nearest(str(choice), choices, cutoff=0.3)
    hint = f"{group}={near} is the nearest; " if near else ""
    if group == "data" and {*str(choice)} & {*"./"}:
        hint = f"data=text data.path={choice}; "
    for setting in SETTINGS.values():
        if setting.leaf == group and takes(setting.name, choice):
            hint = f"{setting.name}={choice}, as {group} is a group of settings; "
    rule = f"unknown choice: there is no conf/{group}/{choice}.yaml"
    return Problem(group, choice, rule, f"{hint}choices: {', '.join(choices)}")


def takes(name: str, value: Any) -> bool:
    """Whether a setting can have the value, as far as it alone says."""
    tree = typed_settings()
    try:
        OmegaConf.update(tree, name, value)
        return outside(SETTINGS[name], OmegaConf.select(tree, name)) is None
    except (OmegaConfBaseException, OverflowError):
        return False


def _meant(name: str, value: Any) -> str:
    """What to write instead of an unknown setting."""
    if instead := INSTEAD.get(name.rpartition(".")[2]):
        return instead
    if (near := nearest_setting(name)) and (near not in SETTINGS or takes(near, value)):
        typed = value if isinstance(value, str) and re.fullmatch(r"[\w./-]+", value) else as_override(value)
        return f"did you mean {near}={typed} ?"
    if near:
        return f"the nearest setting is {near}: {SETTINGS[near].words}; all are in docs/configuration.md"
    group = name.partition(".")[0]
    names = ", ".join(setting.leaf for setting in SETTINGS.values() if setting.group == group)
    listed = f"settings of {group}: {names}" if names else f"groups: {', '.join(GROUPS)}"
    return f"{listed}; all are in docs/configuration.md"

"""Examines one override after the other: is it readable, does its setting exist, is its value of the right type?

What passes goes to Hydra unchanged, so an accepted override means exactly what Hydra makes of it. The settings whose
override was refused are remembered as `doubtful`: rules that read them would judge a value that nobody asked for.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalite.config.arguments import FIXED_HYDRA_SETTINGS, Arguments
from megalite.config.secrecy import ADVICE, HIDDEN, secret_name, secret_override, secret_value
from megalite.config.settings import EXPERIMENT, GROUPS, SETTINGS, Setting, yaml_value
from megalite.config.suggest import SAID_OTHERWISE, nearest_setting
from megalite.config.typed import typed_settings
from megalite.errors.problems import LONGEST_SHOWN, NO_VALUE, Problem, shortened
from megalite.errors.remedies import nearest


class Examination:
    """The overrides of one command line: those accepted, the problems of the rest, the settings left in doubt."""

    def __init__(self, loader: Any, arguments: Arguments) -> None:
        self.loader = loader
        self.config_name = arguments.config_name
        self.search_path = arguments.search_path
        self.parser = OverridesParser.create()
        self.typed = typed_settings()
        self.accepted: list[str] = []
        self.problems: list[Problem] = []
        self.doubtful: set[str] = set()
        self.named: set[str] = set()  # the settings that they speak of, right or wrong
        self.choices: list[str] = []  # the accepted ones that choose the file of a group

    def examine(self, text: str) -> None:
        """Accepts the override or notes what is wrong with it."""
        if secret_override(text):
            self._refuse(_secret(text))
            return
        try:
            override = self.parser.parse_override(text)
        except (HydraException, ValueError, RecursionError) as error:  # too many digits, too many brackets
            self._refuse(_unreadable(text, error))
            return
        problems = list(self._problems(text, override))
        self.named |= _named(override.key_or_group, override.value())
        for problem in problems:
            self._refuse(problem)
        if not problems:
            self.accepted.append(text)
            if override.key_or_group in (*GROUPS, EXPERIMENT) and not isinstance(override.value(), dict):
                self.choices.append(text)

    def _refuse(self, problem: Problem) -> None:
        self.problems.append(problem)
        name = problem.setting.lstrip("+~")
        known = name in SETTINGS or name in GROUPS or name == EXPERIMENT
        meant = name if known else nearest_setting(name) or name  # `data.pth=x` was to set data.path
        self.doubtful.update(SETTINGS if meant == EXPERIMENT else [meant])  # no one knows what a recipe was to set

    def _problems(self, text: str, override: Override) -> Iterator[Problem]:
        name, value = override.key_or_group, override.value()
        prefix = "++" if text.startswith("++") else "+" if text.startswith("+") else ""
        if "_target_" in name.split(".") or _holds_key(value, "_target_"):
            yield Problem(name, text.partition("=")[2], "_target_ is not accepted anywhere", _what_to_choose(name))
        elif override.is_sweep_override():
            listed = text.partition("=")[2]
            remedy = f"for a list {name}=[{listed}], for one text quotes around it, for a run per value --multirun"
            yield Problem(name, listed, "several values", remedy)
        elif override.is_delete():
            yield Problem(
                f"~{name}", NO_VALUE, "settings cannot be removed", "give it another value, null where that is allowed"
            )
        elif name == "hydra" or name.startswith(("hydra.", "hydra/")):
            if name not in (*FIXED_HYDRA_SETTINGS, "hydra.mode"):
                rule = "has no effect: Hydra composes the settings of a run and does nothing else"
                remedy = "leave it out; what can be set is in docs/configuration.md"
                sweeps = name.startswith(("hydra.sweep", "hydra.launcher", "hydra/sweeper", "hydra/launcher"))
                yield Problem(name, value, rule, "add --multirun, or leave it out" if sweeps else remedy)
        elif override.package is not None:
            yield Problem(override.get_key_element(), value, "groups keep their place here", f"{name}={value}")
        elif not isinstance(value, dict) and (choices := self._choices(name)):
            yield from self._group_problems(name, value, choices, prefix)
        else:
            for leaf, leaf_value in _leaves(name, value):
                yield from self._leaf_problems(leaf, leaf_value, prefix)

    def _choices(self, group: str) -> list[str]:
        """The files of a group, those of --config-dir included; empty where there is no such group."""
        if "." in group:
            return []
        found = self.loader.get_group_options(group, config_name=self.config_name, overrides=self.search_path)
        return list(found)

    def _group_problems(self, group: str, value: Any, choices: list[str], prefix: str) -> Iterator[Problem]:
        if prefix and group in (*GROUPS, EXPERIMENT):
            yield Problem(f"{prefix}{group}", value, "is chosen already", f"without the plus: {group}={value}")
            return
        for choice in value if isinstance(value, list) else [value]:
            if choice not in choices:
                yield _unknown_choice(group, choice, choices)

    def _leaf_problems(self, name: str, value: Any, prefix: str) -> Iterator[Problem]:
        setting = SETTINGS.get(name)
        if setting is None:
            yield _unknown_setting(name, value, prefix)
        elif prefix == "+":
            yield Problem(
                f"+{name}", value, "exists already, and + adds a new one", f"without the plus: {name}={value}"
            )
        elif setting.kind is bool and type(value) is int and value not in (0, 1):  # to OmegaConf, 2 is true
            yield _wrong_type(setting, value)
        else:
            try:
                OmegaConf.update(self.typed, name, value, merge=True)
            except (OmegaConfBaseException, OverflowError):  # the latter: 400 digits, and no point among them
                yield _wrong_type(setting, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """`model={norm: rmsnorm}` sets what `model.norm=rmsnorm` sets."""
    if isinstance(value, dict) and name not in SETTINGS:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    else:
        yield name, value


def _named(name: str, value: Any) -> set[str]:
    """The settings that an override speaks of: all of a group whose file it chooses, every one for a recipe."""
    if leaves := {leaf for leaf, _ in _leaves(name, value)} & SETTINGS.keys():
        return leaves
    if name.split(".")[0].split("/")[0] == "hydra":
        return set()
    return {setting.name for setting in SETTINGS.values() if setting.group == name or name not in GROUPS}


def _holds_key(value: Any, name: str) -> bool:
    if isinstance(value, dict):
        return any(str(key) == name or _holds_key(inner, name) for key, inner in value.items())
    return isinstance(value, list) and any(_holds_key(inner, name) for inner in value)


def _what_to_choose(name: str) -> str:
    if name.split(".")[0] == "hydra":
        return "leave it out"
    return (
        "parts are chosen by name: model=NAME, model.norm=rmsnorm, model.activation=swiglu; see docs/configuration.md"
    )


def _secret(text: str) -> Problem:
    name = text.partition("=")[0]
    shown = name if "=" in text and not secret_value(name) else HIDDEN
    holds = "the name is that of a secret" if shown == name and secret_name(name) else "the value looks like a secret"
    unknown = "" if name.lstrip("+~") in SETTINGS or shown == HIDDEN else "unknown setting, and "
    return Problem(shown, HIDDEN, f"{unknown}{holds}", ADVICE)


def _unreadable(text: str, error: Exception) -> Problem:
    name, equals, value = text.partition("=")
    if not equals:
        word = name.lstrip("+~")
        near = nearest_setting(word)
        meant = word if word in SETTINGS or word in GROUPS else near or "model"
        return Problem(
            shortened(text),
            NO_VALUE,
            "not an override: there is no '='",
            f"write {meant}=VALUE; overrides look like train.steps=100",
        )
    said, value = str(error).strip().splitlines()[0][:LONGEST_SHOWN], shortened(value)
    if isinstance(error, ValueError):
        remedy = (
            f"a number of fewer digits{f', as {name}={yaml_value(SETTINGS[name].default)}' if name in SETTINGS else ''}"
        )
    elif value.startswith(("[", "{")):
        remedy = f"""put quotes around the whole, and inside around each text with signs or blanks: '{name}=["a b"]'"""
    else:
        remedy = f"""put the value in quotes: '{name}="{value}"'"""
    return Problem(name, value, f"cannot be read ({said})", remedy)


def _unknown_choice(group: str, choice: Any, choices: list[str]) -> Problem:
    listed = f"choices: {', '.join(choices)}"
    elsewhere = [setting.name for setting in SETTINGS.values() if setting.leaf == group]
    if elsewhere:
        remedy = f"{elsewhere[0]}={choice}; {group} is a group of settings, {listed}"
    elif group == "data" and (os.path.exists(str(choice)) or re.search(r"[./]", str(choice))):
        remedy = f"data=text data.path={choice}; {listed}"
    elif near := nearest(str(choice), choices, cutoff=0.3):
        remedy = f"{group}={near} is the nearest; {listed}"
    else:
        remedy = listed
    return Problem(group, choice, f"unknown choice: there is no conf/{group}/{choice}.yaml", remedy)


def _unknown_setting(name: str, value: Any, prefix: str) -> Problem:
    if instead := SAID_OTHERWISE.get(name.rpartition(".")[2]):
        return Problem(prefix + name, value, "unknown setting", instead)
    if near := nearest_setting(name):
        shown = value if isinstance(value, str | int | float | bool) else "..."
        return Problem(prefix + name, value, "unknown setting", f"did you mean {near}={shown} ?")
    group = name.partition(".")[0]
    names = ", ".join(setting.leaf for setting in SETTINGS.values() if setting.group == group)
    listed = f"settings of {group}: {names}" if names else f"groups: {', '.join(GROUPS)}"
    return Problem(prefix + name, value, "unknown setting", f"{listed}; all are in docs/configuration.md")


def _wrong_type(setting: Setting, value: Any) -> Problem:
    example = yaml_value(setting.default)
    if setting.kind is int and isinstance(value, float) and value.is_integer():
        example = str(int(value))
    elif setting.kind is bool:
        example = f"true or {setting.name}=false"
    elif setting.kind is int and setting.default is None:
        example = "8, or null (derived)"
    return Problem(setting.name, value, f"must be {setting.type_words}", f"{setting.name}={example}")

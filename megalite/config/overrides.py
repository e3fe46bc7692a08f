"""Examines one override after the other: is it readable, does its setting exist, is its value of the right type?

What passes goes to Hydra unchanged, so an accepted override means exactly what Hydra makes of it. The settings whose
override was refused are remembered as `doubtful`: rules that read them would judge a value that nobody asked for.
"""

from collections.abc import Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalite.config.arguments import Arguments
from megalite.config.secrecy import ADVICE, HIDDEN, secret_name, secret_override, secret_value
from megalite.config.settings import EXPERIMENT, GROUPS, SETTINGS, Setting, typed_settings, yaml_value
from megalite.config.suggest import INSTEAD, nearest_setting
from megalite.errors.problems import LONGEST_SHOWN, NO_VALUE, Problem, shortened
from megalite.errors.remedies import nearest

CHOSEN = (*GROUPS, EXPERIMENT)  # what is chosen by the name of a file in conf/


class Examination:
    """The overrides of one command line: those accepted, the problems of the rest, the settings left in doubt."""

    def __init__(self, loader: Any, arguments: Arguments) -> None:
        self.loader, self.arguments = loader, arguments
        self.parser = OverridesParser.create()
        self.typed = typed_settings()
        self.accepted: list[str] = []
        self.choices: list[str] = []  # the accepted ones that choose the file of a group
        self.problems: list[Problem] = []
        self.doubtful: set[str] = set()
        self.named: set[str] = set()  # the settings that they speak of, right or wrong

    def examine(self, text: str) -> None:
        """Accepts the override or notes what is wrong with it."""
        if secret_override(text):
            problems = [_secret(text)]
        else:
            try:
                override = self.parser.parse_override(text)
                self.named |= _named(override.key_or_group, override.value())
                problems = list(self._problems(text, override))
                if not problems:
                    self.accepted.append(text)
                    chooses = override.key_or_group in CHOSEN and not isinstance(override.value(), dict)
                    self.choices += [text] * chooses
            except (HydraException, ValueError, RecursionError) as error:  # too many digits, too many brackets
                problems = [_unreadable(text, error)]
        self.problems += problems
        for name in (problem.setting.lstrip("+~") for problem in problems):
            known = name in SETTINGS or name in CHOSEN
            meant = name if known else nearest_setting(name) or name  # `data.pth=x` was to set data.path
            self.doubtful.update(SETTINGS if meant == EXPERIMENT else [meant])  # no one knows what a recipe was to set

    def _problems(self, text: str, override: Override) -> Iterator[Problem]:
        name, value = override.key_or_group, override.value()
        prefix, given = text[: len(text) - len(text.lstrip("+"))], text.partition("=")[2]
        if override.is_sweep_override():
            remedy = f"for a list {name}=[{given}], for one text quotes around it, for a run per value --multirun"
            yield Problem(name, given, "several values", remedy)
        elif override.is_delete():
            yield Problem(f"~{name}", NO_VALUE, "settings cannot be removed", "give it another value, or null")
        elif _of_hydra(name):
            rule = "has no effect: Hydra composes the settings of a run and does nothing else"
            sweeps = name.startswith(("hydra.sweep", "hydra.launcher", "hydra/sweeper", "hydra/launcher", "hydra.mode"))
            yield Problem(name, value, rule, "add --multirun, or leave it out" if sweeps else "leave it out")
        elif override.package is not None or (prefix and name in CHOSEN) or (prefix == "+" and name in SETTINGS):
            rule = "exists already, and keeps its place"
            yield Problem(override.get_key_element(), value, rule, f"without + and @: {name}={value}")
        elif not isinstance(value, dict) and (choices := self._choices(name)):
            unknown = [one for one in (value if isinstance(value, list) else [value]) if one not in choices]
            yield from (_unknown_choice(name, one, choices) for one in unknown)
        else:
            for leaf, leaf_value in _leaves(name, value):
                yield from self._leaf_problems(leaf, leaf_value, prefix)

    def _choices(self, group: str) -> list[str]:
        """The files of a group, those of --config-dir included; empty where there is no such group."""
        if "." in group:
            return []
        name, path = self.arguments.config_name, self.arguments.search_path
        return list(self.loader.get_group_options(group, config_name=name, overrides=path))

    def _leaf_problems(self, name: str, value: Any, prefix: str) -> Iterator[Problem]:
        setting = SETTINGS.get(name)
        if setting is None:
            yield Problem(prefix + name, value, "unknown setting", _meant(name, value))
            return
        try:
            OmegaConf.update(self.typed, name, value, merge=True)
            right = setting.kind is not bool or value in (0, 1) or not isinstance(value, int)  # to OmegaConf, 2 is true
        except (OmegaConfBaseException, OverflowError):  # the latter: 400 digits, and no point among them
            right = False
        if not right:
            yield _wrong_type(setting, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """`model={norm: rmsnorm}` sets what `model.norm=rmsnorm` sets."""
    if isinstance(value, dict) and name not in SETTINGS:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    else:
        yield name, value


def _of_hydra(name: str) -> bool:
    return name.split(".")[0].split("/")[0] == "hydra"


def _named(name: str, value: Any) -> set[str]:
    """The settings that an override speaks of: all of a group whose file it chooses, every one for a recipe."""
    if leaves := {leaf for leaf, _ in _leaves(name, value)} & SETTINGS.keys():
        return leaves
    named = (setting.name for setting in SETTINGS.values() if setting.group == name or name not in GROUPS)
    return set() if _of_hydra(name) else set(named)


def _secret(text: str) -> Problem:
    name = text.partition("=")[0]
    shown = name if "=" in text and not secret_value(name) else HIDDEN
    holds = "the name is that of a secret" if shown == name and secret_name(name) else "the value looks like a secret"
    return Problem(shown, HIDDEN, holds, ADVICE)


def _unreadable(text: str, error: Exception) -> Problem:
    name, equals, value = text.partition("=")
    if not equals:
        remedy = f"write {nearest_setting(name.lstrip('+~')) or 'model'}=VALUE; overrides look like train.steps=100"
        return Problem(shortened(text), NO_VALUE, "not an override: there is no '='", remedy)
    said = str(error).strip().splitlines()[0][:LONGEST_SHOWN]
    remedy = f"""quotes around texts with signs or blanks: '{name}="a=b"', in a list around each: '{name}=["a b"]'"""
    return Problem(name, shortened(value), f"cannot be read ({said})", remedy)


def _unknown_choice(group: str, choice: Any, choices: list[str]) -> Problem:
    elsewhere = [setting.name for setting in SETTINGS.values() if setting.leaf == group]
    if elsewhere:
        hint = f"{elsewhere[0]}={choice}, as {group} is a group of settings; "
    elif group == "data" and {*str(choice)} & {*"./"}:
        hint = f"data=text data.path={choice}; "
    else:
        near = nearest(str(choice), choices, cutoff=0.3)
        hint = f"{group}={near} is the nearest; " if near else ""
    rule = f"unknown choice: there is no conf/{group}/{choice}.yaml"
    return Problem(group, choice, rule, f"{hint}choices: {', '.join(choices)}")


def _meant(name: str, value: Any) -> str:
    """What to write instead of an unknown setting."""
    if instead := INSTEAD.get(name.rpartition(".")[2]):
        return instead
    if near := nearest_setting(name):
        return f"did you mean {near}={value if isinstance(value, str | int | float | bool) else '...'} ?"
    group = name.partition(".")[0]
    names = ", ".join(setting.leaf for setting in SETTINGS.values() if setting.group == group)
    listed = f"settings of {group}: {names}" if names else f"groups: {', '.join(GROUPS)}"
    return f"{listed}; all are in docs/configuration.md"


def _wrong_type(setting: Setting, value: Any) -> Problem:
    whole = setting.kind is int and isinstance(value, float) and value.is_integer()
    example = f"{setting.name}={yaml_value(int(value) if whole else setting.default)}"
    return Problem(setting.name, value, f"must be {setting.type_words}", example)

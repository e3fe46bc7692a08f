"""From a command line to a checked config: every mistake is found, and all are in one UserError.

Hydra composes the files that are chosen. Then the settings of the command are set one by one, and the rules judge the
result. Imports neither torch nor any data library. Nothing is written.
"""

import io
import re
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalite.config.arguments import read_arguments, shown
from megalite.config.bounds import bounds
from megalite.config.derive import derive
from megalite.config.hydra_files import composed, files_of, hydra_loader, in_one_line, run_hydra
from megalite.config.inherited import Command, of_recipe, of_run, of_weights
from megalite.config.overrides import (
    as_override,
    assign,
    choices_of,
    nearest_setting,
    read_override,
    settings_named,
    takes,
    unknown,
)
from megalite.config.rules import check, unused
from megalite.config.schema import Config
from megalite.config.secrecy import ADVICE, HIDDEN, secret_name, secret_value
from megalite.config.settings import (
    EXPERIMENT,
    GROUPS,
    SETTINGS,
    as_plain,
    flat,
    leaves,
    nested,
    value_of,
    with_values,
    yaml_value,
)
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect

_VARIABLE = re.compile(r"oc\.env\s*:\s*['\"]?([^,}\s'\"]+)")


class _Reading(NamedTuple):
    """The outcome of a command line. `config` is None where the files cannot be composed."""

    config: Config | None
    problems: list[Problem]
    doubtful: set[str]  # settings that were refused: nobody knows which values they were to have
    inherited: list[str]  # overrides that a folder or a recipe gives


def load_config(argv: Sequence[str], world_size: int, unread: Collection[str] = ()) -> Config:
    """The derived, checked config of a command line, or a UserError with every problem in it, but for those that rules
    find with settings that are `unread`."""
    config, problems, doubtful, _ = _read(read_arguments(argv))
    if config is not None:
        problems += check(config, world_size, doubtful | set(unread))
    if problems or config is None:
        raise UserError(problems)
    return derive(replace(config, told=(*config.told, *unused(config))), world_size)


def names_of(words: Sequence[str]) -> frozenset[str]:
    """The settings and groups that overrides name."""
    return frozenset(word.partition("=")[0].lstrip("+~") for word in words)


def load_part(words: Sequence[str], doer: str, reads: Sequence[str]) -> Config:
    """The config of overrides of which `doer` reads those in `reads`: settings, groups (data=NAME), or all that is in
    a group (data.*). A rule that speaks of another setting is silent."""
    problems = []
    known = {*SETTINGS, *GROUPS, EXPERIMENT}
    read = {name for name in known if name in reads or f"{name.partition('.')[0]}.*" in reads}
    for name in sorted(names_of(words) & known - read):
        listed = ", ".join(f"{one}=NAME" if one in GROUPS else one for one in reads)
        problems.append(Problem(name, NO_VALUE, f"{doer} does not read it", f"what it reads: {listed}"))
    config = collect(lambda: load_config(words, 1, SETTINGS.keys() - read), problems)
    if problems or config is None:
        raise UserError(problems)
    return config


def load_values(words: Sequence[str], reads: Sequence[str]) -> Config:
    """The defaults with the overrides' values of the settings in `reads`, each checked on its own.

    The words may be those of a training command: other settings must exist, and their values are left out. No rule that
    joins settings is asked, so the command asks those that concern it. Raises UserError.
    """
    found, problems, doubtful, _ = _read(read_arguments(words))
    config = with_values(Config(), {name: value_of(found, name) for name in reads} if found else {})
    problems += [problem for problem in bounds(config) if problem.setting not in doubtful]
    if problems:
        raise UserError(problems)
    return config


def show_information(arguments: Namespace) -> int:
    """Answers --help, --cfg job and the like through Hydra, once every override is known to be right."""
    given: list[str] = []
    if not arguments.shell_completion:  # which has words of its own
        _, problems, _, given = _read(arguments)
        if problems:
            raise UserError(problems)
    output = io.StringIO()
    with redirect_stdout(output):
        status = run_hydra([*given, *arguments.overrides, *shown(arguments)], lambda config: None, arguments)
    with suppress(OSError):  # `--help | head`, a full disk
        print(output.getvalue(), end="", flush=True)
    return status


def _read(arguments: Namespace) -> _Reading:
    problems: list[Problem] = []
    files = files_of(arguments)
    loader = hydra_loader(files)
    read = (collect(partial(read_override, text, loader), problems) for text in arguments.overrides)
    overrides = [override for override in read if override is not None]
    choices = [override for override in overrides if choices_of(override, loader)]
    found = collect(partial(composed, loader, files, [str(each.input_line) for each in choices]), problems)
    problems += [unknown(name, value) for name, value in leaves(found or {}).items() if name not in SETTINGS]
    by_files = flat(as_plain(Config())) | flat(found or {})  # without files, the other overrides can be checked, too
    written = dict(by_files)  # the settings before interpolations are resolved
    for override in overrides:
        problems += assign(written, override) if override not in choices else ()
    departures = tuple(name for name in SETTINGS if written[name] != by_files[name])
    texts, told = list[str](), list[str]()
    for source, values_of in _sources(arguments, files.recipe, overrides).items() if found is not None else ():
        command = Command(written, set[str]().union(*map(settings_named, overrides)))
        values = collect(partial(values_of, command), problems) or {}
        new = [f"{name}={as_override(value)}" for name, value in values.items()]
        for text in new:
            problems += assign(written, OverridesParser.create().parse_override(text))
        texts += new
        told += [f"{source}: {', '.join(new)}"] * bool(new)
    meant = {nearest_setting(name) or name for name in (problem.setting.lstrip("+~") for problem in problems)}
    doubtful = {*SETTINGS} if EXPERIMENT in meant else meant  # no one knows what a recipe was to set
    if found is None:
        return _Reading(None, problems, doubtful, [])
    resolved, unresolved = _resolved(written)
    doubtful |= {problem.setting for problem in unresolved}
    config = replace(with_values(Config(), resolved), told=tuple(told), departures=departures)
    return _Reading(config, problems + unresolved, doubtful, texts)


def _sources(
    arguments: Namespace, recipe: Path | None, overrides: list[Override]
) -> dict[str, Callable[[Command], dict[str, Any]]]:
    """Where settings come from besides the command, in words. A command that names the config takes nothing from
    elsewhere."""
    if recipe is not None:
        return {f"from {recipe}": partial(of_recipe, recipe)}
    if arguments.config_name or arguments.config_path:
        return {}
    asked = any(override.get_key_element() == "tokenizer" for override in overrides)
    return {"as before": of_run, "from the weights": partial(of_weights, asked=asked)}


def _resolved(written: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """All values, with interpolations resolved and types checked; a wrong value becomes a problem and the default."""
    problems: list[Problem] = []
    tree, values = OmegaConf.create(nested(written)), dict[str, Any]()
    for name, setting in SETTINGS.items():
        found = _value(tree, name, written[name])
        if isinstance(found, Problem):
            problems.append(found)
            OmegaConf.update(tree, name, setting.default, merge=False)  # others may refer to it
        values[name] = setting.default if isinstance(found, Problem) else found
    return values, problems


def _value(tree: DictConfig, name: str, written: Any) -> Any:
    """The value of a setting, or the problem with it."""
    setting, value = SETTINGS[name], written
    if secret := [one for one in _VARIABLE.findall(str(written)) if "$" in one or secret_name(one)]:
        rule = f"the environment variable {secret[0]} may hold a secret, and run folders keep the config"
        return Problem(name, written, rule, ADVICE)
    place = f" in place of {written}" if "${" in str(written) or written == "???" else ""
    try:
        value = OmegaConf.select(tree, name, throw_on_missing=True)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        if secret_value(str(value)):  # it came in by a file or by ${oc.env:NAME}
            return Problem(name, HIDDEN, "looks like a secret, and run folders keep the config", ADVICE)
        return setting.typed(value)
    except OmegaConfBaseException as error:
        return Problem(name, written, in_one_line(error), f"{name}={yaml_value(setting.default)}{place}")
    except (ValueError, OverflowError):  # the latter: 400 digits, and no point among them
        whole = setting.kind is int and isinstance(value, float) and value.is_integer() and takes(name, int(value))
        remedy = f"{name}={yaml_value(int(value) if whole else setting.default)}{place}"
        shown = written if isinstance(value, dict) and place else value  # ${data} is long
        return Problem(name, shown, f"must be {setting.type_words}", remedy)

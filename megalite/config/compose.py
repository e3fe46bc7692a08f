"""From a command line to a checked config: every mistake is found, and all are in one UserError.

Hydra stops at its first error, so each override is examined on its own against the schema; Hydra then composes those
that passed, and the rules judge the result. Imports neither torch nor any data library. Nothing is written.
"""

import io
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import yaml  # type: ignore[import-untyped]
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from megalite.config.arguments import Arguments, read_arguments
from megalite.config.bounds import bounds
from megalite.config.derive import derive
from megalite.config.inherited import of_run, of_weights
from megalite.config.overrides import CHOSEN, Examination
from megalite.config.rules import check
from megalite.config.schema import Config
from megalite.config.secrecy import ADVICE, HIDDEN, secret_name, secret_value
from megalite.config.settings import GROUPS, SETTINGS, flat, typed_settings, value_of, with_values, yaml_value
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect

PACKAGE = Path(__file__).resolve().parents[1]
CONF = folder if (folder := PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"  # of a wheel; of a checkout
SCHEMA = "megalite_schema"  # the name under which conf/config.yaml finds the schema

_VARIABLE = re.compile(r"oc\.env\s*:\s*['\"]?([^,}\s'\"]+)")


@dataclass(frozen=True)
class _Reading:
    """What a command line amounts to. `config`: as far as it can be composed; `doubtful`: settings left in doubt."""

    config: Config | None
    problems: list[Problem]
    doubtful: set[str]
    inherited: list[str]
    departures: tuple[str, ...] = ()


def load_config(argv: Sequence[str], world_size: int, unread: Collection[str] = ()) -> Config:
    """The derived, checked config of a command line, or a UserError with every problem in it, but for those that rules
    find with settings that are `unread`."""
    reading = _read(argv)
    problems = reading.problems
    if reading.config is not None:
        problems += check(reading.config, world_size, reading.doubtful | set(unread))
    if problems or reading.config is None:
        raise UserError(problems)
    config = replace(reading.config, departures=reading.departures)
    return replace(derive(config, world_size), inherited=tuple(reading.inherited))


def names_of(words: Sequence[str]) -> frozenset[str]:
    """The settings and groups that overrides name."""
    return frozenset(word.partition("=")[0].lstrip("+~") for word in words)


def load_part(words: Sequence[str], doer: str, reads: Sequence[str]) -> Config:
    """The config of overrides of which `doer` reads those in `reads`: settings, groups (data=NAME), or all that is in
    a group (data.*). A rule that speaks of another setting is silent."""
    problems = []
    read = {name for name in (*SETTINGS, *GROUPS) if name in reads or f"{name.partition('.')[0]}.*" in reads}
    for name in sorted(names_of(words) - read):
        if name in SETTINGS or name in CHOSEN:
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
    reading = _read(words)
    config = with_values(Config(), {name: value_of(reading.config, name) for name in reads} if reading.config else {})
    doubtful = reading.doubtful
    problems = reading.problems + [problem for problem in bounds(config) if problem.setting not in doubtful]
    if problems:
        raise UserError(problems)
    return config


def show_information(argv: list[str]) -> int:
    """Answers --help, --cfg job and the like through Hydra, once every override is known to be right."""
    arguments, problems = read_arguments(argv)
    reading = _Reading(None, problems, set(), [])
    if "--shell-completion" not in arguments.information:  # which has words of its own
        reading = _read(argv)
    if reading.problems:
        raise UserError(reading.problems)
    path = ["--config-path", arguments.config_path or str(CONF)]
    words = [*arguments.search_path, *reading.inherited, *arguments.overrides, *arguments.information, *path]
    shown = io.StringIO()
    with redirect_stdout(shown):
        status = run_hydra(words if arguments.information else argv, lambda config: None)
    with suppress(OSError):  # `--help | head`, a full disk
        print(shown.getvalue(), end="", flush=True)
    return status


def run_hydra(words: Sequence[str], function: Callable[[DictConfig], Any]) -> int:
    """Lets Hydra itself read a command line, and call the function if that is for it; the exit status."""
    given, sys.argv[1:] = sys.argv[1:], words
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(function)()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv[1:] = given
    return 0


@contextmanager
def hydra_loader(arguments: Arguments) -> Iterator[Any]:
    """Hydra's config loader over conf/ (or --config-path), whatever the working directory is. It checks every key and
    type against the schema."""
    ConfigStore.instance().store(name=SCHEMA, node=typed_settings())
    GlobalHydra.instance().clear()
    with initialize_config_dir(arguments.config_path or str(CONF), job_name="pretrain_gpt", version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def _read(argv: Sequence[str]) -> _Reading:
    arguments, problems = read_arguments(list(argv))
    with hydra_loader(arguments) as loader:
        compose = partial(_compose, loader, arguments)
        examination = Examination(loader, arguments)
        for override in arguments.overrides:
            examination.examine(override)
        composed, found = compose(examination.accepted)
        ours = arguments.config_name == "config" and arguments.config_path is None
        departures: tuple[str, ...] = ()
        if composed is not None and len(examination.choices) < len(examination.accepted):
            # Without a choice conf/ gives the schema's defaults; to compose them again would take a tenth of a second.
            chosen = compose(examination.choices)[0] if examination.choices or not ours else typed_settings()
            given, by_files = _written(composed), _written(chosen)
            departures = tuple(name for name in SETTINGS if given.get(name) != by_files.get(name))
        inherited: list[str] = []
        for source in (of_run, of_weights) if ours else ():
            if composed is None:
                break
            more = collect(partial(source, composed, examination.named), problems) or []
            for override in more:
                examination.examine(override)
            inherited += more
            composed, found = compose(examination.accepted) if more else (composed, found)
    problems += examination.problems + found
    if composed is None:
        return _Reading(None, problems, set(), inherited)
    config, unresolved = _resolved(composed, examination.doubtful, arguments.config_name)
    doubtful = examination.doubtful | {problem.setting for problem in found + unresolved}
    return _Reading(config, problems + unresolved, doubtful, inherited, departures)


def _compose(loader: Any, arguments: Arguments, overrides: list[str]) -> tuple[DictConfig | None, list[Problem]]:
    """The composed config; overrides that only fail together with the others are found one by one and left out."""

    def attempt(words: Sequence[str]) -> DictConfig:
        words = [*arguments.search_path, *words]
        composed = loader.load_configuration(arguments.config_name, words, run_mode=RunMode.RUN, from_shell=False)
        with open_dict(composed):
            del composed["hydra"]
        return composed  # type: ignore[no-any-return]

    with suppress(Exception):  # which override it was is found below
        return attempt(overrides), []
    accepted: list[str] = []
    problems: list[Problem] = []
    try:
        composed = attempt(accepted)
    except Exception as error:  # whatever Hydra makes of a file: no YAML, no UTF-8, no permission, too deep, no mapping
        remedy = "leave it out for conf/config.yaml, or mend the file"
        return None, [Problem("--config-name", arguments.config_name, _first_words(error), remedy)]
    for override in overrides:
        try:
            composed = attempt([*accepted, override])
            accepted.append(override)
        except Exception as error:
            name, _, value = override.partition("=")
            remedy = "mend the file" if name.lstrip("+") in CHOSEN else "see docs/configuration.md, or --help"
            problems.append(Problem(name, value, _first_words(error), remedy))
    return composed, problems


def _first_words(error: BaseException) -> str:
    """What Hydra says, with the cause that it hides, in one line."""
    if isinstance(error, yaml.YAMLError):
        return " ".join(str(error).split())
    said = [str(part).strip().splitlines() for part in (error, error.__cause__) if part is not None]
    parts = [" ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".:") for lines in said if lines]
    return ": ".join(parts) or type(error).__name__


def _written(tree: DictConfig | None) -> dict[str, Any]:
    """The settings as they are written, before interpolations are resolved."""
    return {} if tree is None else flat(OmegaConf.to_container(tree))  # type: ignore[arg-type]


def _resolved(composed: DictConfig, doubtful: set[str], file: str) -> tuple[Config | None, list[Problem]]:
    """The plain dataclasses, interpolations resolved; values that do not resolve become problems and defaults.

    None where `file`, a config of the user's own that leaves the schema out, has settings that there are not.
    """
    problems, values = [], typed_settings()
    try:
        OmegaConf.merge(values, composed)
    except OmegaConfBaseException as error:
        remedy = f"mend the file, with {SCHEMA} first in its defaults"
        return None, [Problem("--config-name", file, _first_words(error), remedy)]
    for name, written in _written(composed).items():
        variables = _VARIABLE.findall(str(written))
        if secret := [variable for variable in variables if "$" in variable or secret_name(variable)]:
            rule = f"the environment variable {secret[0]} may hold a secret, and run folders keep the config"
            problems.append(Problem(name, written, rule, ADVICE))
            OmegaConf.update(composed, name, SETTINGS[name].default)  # others may refer to it
            continue
        try:
            value = OmegaConf.select(composed, name, throw_on_missing=True)
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
            OmegaConf.update(values, name, value)
        except OmegaConfBaseException as error:
            remedy = f"{name}={yaml_value(SETTINGS[name].default)} in place of {written}"
            problems.append(Problem(name, written, _first_words(error), remedy))
            OmegaConf.update(composed, name, SETTINGS[name].default)
        else:
            if name not in doubtful and secret_value(str(value)):  # it came in by a file or by ${oc.env:NAME}
                problems.append(Problem(name, HIDDEN, "looks like a secret, and run folders keep the config", ADVICE))
    return with_values(Config(), _written(values)), problems

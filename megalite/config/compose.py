"""From a command line to a checked config: every mistake is found, and told in one UserError.

Hydra stops at its first error, so each override is examined on its own against the schema; Hydra then composes those
that passed, and the rules judge the result. Imports neither torch nor any data library. Nothing is written.
"""

import io
import os
import re
import sys
from collections.abc import Collection, Iterator
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

from megalite.config.arguments import FIXED_HYDRA_SETTINGS, Arguments, read_arguments
from megalite.config.derive import derive
from megalite.config.inherited import of_run, of_weights
from megalite.config.overrides import Examination
from megalite.config.rules import check
from megalite.config.schema import Config
from megalite.config.secrecy import ADVICE, HIDDEN, secret_name, secret_value
from megalite.config.settings import EXPERIMENT, GROUPS, SETTINGS, from_plain, value_of, yaml_value
from megalite.config.typed import typed_settings
from megalite.errors.problems import Problem, UserError, collect

PACKAGE = Path(__file__).resolve().parents[1]
CONF = folder if (folder := PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"  # of a wheel; of a checkout
SCHEMA = "megalite_schema"  # the name under which conf/config.yaml finds the schema

_ANY_VARIABLE = re.compile(r"oc\.env:\s*['\"]?([^,}\s'\"]+)")
_VARIABLE = re.compile(r"\$\{oc\.env:\s*([^,}\s]+)\s*\}")  # one that nothing is written for in case it is not set


def register_schema() -> None:
    """Lets Hydra check every key and type of conf/ and of overrides against the schema."""
    ConfigStore.instance().store(name=SCHEMA, node=typed_settings())


@dataclass(frozen=True)
class _Reading:
    """What a command line amounts to. `config`: as far as it can be composed; `doubtful`: settings left in doubt."""

    config: Config | None
    problems: list[Problem]
    doubtful: set[str]
    inherited: list[str]
    departures: tuple[str, ...] = ()


def load_config(argv: list[str], world_size: int, unread: Collection[str] = ()) -> Config:
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
    given, sys.argv[1:] = sys.argv[1:], words if arguments.information else argv  # Hydra reads the command line itself
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            hydra.main(version_base="1.3", config_path=None, config_name="config")(lambda config: None)()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        sys.argv[1:] = given
    with suppress(OSError):  # `--help | head`, a full disk
        print(shown.getvalue(), end="", flush=True)
    return status


def _read(argv: list[str]) -> _Reading:
    arguments, problems = read_arguments(argv)
    with hydra_loader(arguments) as loader:
        examination = Examination(loader, arguments)
        for override in arguments.overrides:
            examination.examine(override)
        composed, found = _compose(loader, arguments, examination.accepted)
        departures = _departures(loader, arguments, composed, examination)
        inherited: list[str] = []
        ours = arguments.config_name == "config" and arguments.config_path is None
        for source in (of_run, of_weights):
            if ours and composed is not None:
                more = collect(partial(source, composed, examination.named), problems) or []
                for override in more:
                    examination.examine(override)
                inherited += more
                composed, found = _compose(loader, arguments, examination.accepted) if more else (composed, found)
    problems += examination.problems + found
    if composed is None:
        return _Reading(None, problems, set(), inherited)
    config, unresolved = _to_config(composed, examination.doubtful, arguments.config_name)
    doubtful = examination.doubtful | {problem.setting for problem in found + unresolved}
    return _Reading(config, problems + unresolved, doubtful, inherited, departures)


def _departures(
    loader: Any, arguments: Arguments, composed: DictConfig | None, examination: Examination
) -> tuple[str, ...]:
    """The settings to which the command gives another value than the files that it chooses, in the schema's order."""
    if composed is None or len(examination.choices) == len(examination.accepted):
        return ()
    try:
        chosen = _compose_once(loader, arguments, examination.choices)
    except Exception:  # of Hydra, about files of the user's own, which the whole command then mends
        return ()
    ours, theirs = (OmegaConf.to_container(tree, resolve=False) for tree in (composed, chosen))
    return tuple(name for name in SETTINGS if _plain(ours, name) != _plain(theirs, name))


@contextmanager
def hydra_loader(arguments: Arguments) -> Iterator[Any]:
    """Hydra's config loader over conf/ (or --config-path), whatever the working directory is."""
    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(arguments.config_path or str(CONF), job_name="pretrain_gpt", version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def _compose(loader: Any, arguments: Arguments, overrides: list[str]) -> tuple[DictConfig | None, list[Problem]]:
    """The composed config; overrides that only fail together with the others are found one by one and left out."""
    problems: list[Problem] = []
    composed: DictConfig | None = None
    try:
        return _compose_once(loader, arguments, overrides), problems
    except Exception:
        pass  # which override it was is found below
    accepted: list[str] = []
    try:
        composed = _compose_once(loader, arguments, accepted)
    except Exception as error:  # whatever Hydra makes of a file: no YAML, no UTF-8, no permission, too deep, no mapping
        name = arguments.config_name
        problem = Problem(
            "--config-name", name, _first_words(error), "leave it out for conf/config.yaml, or mend the file"
        )
        return None, [problem]
    for override in overrides:
        try:
            composed = _compose_once(loader, arguments, [*accepted, override])
            accepted.append(override)
        except Exception as error:
            name, _, value = override.partition("=")
            file = name.lstrip("+") in (*GROUPS, EXPERIMENT)
            remedy = "mend the file" if file else "see docs/configuration.md, or --help"
            problems.append(Problem(name, value, _first_words(error), remedy))
    return composed, problems


def _compose_once(loader: Any, arguments: Arguments, overrides: list[str]) -> DictConfig:
    composed = loader.load_configuration(
        arguments.config_name, [*arguments.search_path, *overrides], run_mode=RunMode.RUN, from_shell=False
    )
    assert isinstance(composed, DictConfig)
    return composed


def _first_words(error: BaseException) -> str:
    """What Hydra says, with the cause that it hides, in one line; only its first sentence tells something."""
    if isinstance(error, yaml.YAMLError):
        return " ".join(str(error).split())
    said = [str(part).strip().splitlines() for part in (error, error.__cause__) if part is not None]
    parts = [" ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".:") for lines in said if lines]
    return ": ".join(parts) or type(error).__name__


def _to_config(composed: DictConfig, doubtful: set[str], file: str) -> tuple[Config | None, list[Problem]]:
    """The plain dataclasses, interpolations resolved; values that do not resolve become problems and defaults.

    None where `file`, a config of the user's own that leaves the schema out, has settings that there are not.
    """
    problems = list(_hydra_problems(composed))
    with open_dict(composed):
        del composed["hydra"]
    written = OmegaConf.to_container(composed, resolve=False)
    typed = typed_settings()
    for name, setting in SETTINGS.items():
        if problem := _unresolved(composed, name, _plain(written, name), typed):
            problems.append(problem)
            OmegaConf.update(composed, name, setting.default)
    try:
        plain = OmegaConf.to_container(OmegaConf.merge(typed_settings(), composed), resolve=True)
    except OmegaConfBaseException as error:
        remedy = f"mend the file, with {SCHEMA} first in its defaults"
        return None, [*problems, Problem("--config-name", file, _first_words(error), remedy)]
    assert isinstance(plain, dict)
    config = from_plain(plain)
    for name in SETTINGS:  # secrets that came in by a file or by ${oc.env:NAME}
        if name not in doubtful and secret_value(str(value_of(config, name))):
            problems.append(Problem(name, HIDDEN, "looks like a secret, and run folders keep the config", ADVICE))
    return config, problems


def _unresolved(composed: DictConfig, name: str, written: Any, typed: DictConfig) -> Problem | None:
    """The problem of a value that is left open (`???`) or that refers (`${...}`) to nothing or to another type."""
    setting, refers = SETTINGS[name], "${" in str(written)
    instead = f"{'a value' if setting.default is None else f'{name}={yaml_value(setting.default)}'} in place of "
    if secret := [
        variable for variable in _ANY_VARIABLE.findall(str(written)) if "$" in variable or secret_name(variable)
    ]:
        rule = f"the environment variable {secret[0]} may hold a secret, and run folders keep the config"
        return Problem(name, written, rule, ADVICE)
    try:
        value = OmegaConf.select(composed, name, throw_on_missing=True, throw_on_resolution_failure=True)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        if unset := [variable for variable in _VARIABLE.findall(str(written)) if variable not in os.environ]:
            rule = f"the environment variable {unset[0]} is not set"
            return Problem(name, written, rule, f"export {unset[0]}=..., or {instead}${{...}}")
        rule = _first_words(error) if refers else "left open, but a value is needed"
        return Problem(name, written, rule, instead + ("${...}" if refers else "???"))
    try:
        if refers:
            OmegaConf.update(typed, name, value)
    except OmegaConfBaseException:
        return Problem(name, written, f"refers to what is not {setting.type_words}", f"{instead}${{...}}")
    return None


def _hydra_problems(composed: DictConfig) -> Iterator[Problem]:
    for name, fixed in FIXED_HYDRA_SETTINGS.items():
        value = OmegaConf.select(composed, name)
        if value != fixed:
            shown = "null" if fixed is None else fixed
            remedy = f"leave {name}={shown}; the run's folder is run_dir=PATH"
            yield Problem(
                name, _plain(composed, name), "Hydra must leave nothing on disk, nor change the folder", remedy
            )
    if composed.hydra.mode not in (None, RunMode.RUN):
        yield Problem("hydra.mode", composed.hydra.mode.name, "a sweep is asked for by a flag", "--multirun")


def _plain(tree: Any, name: str) -> Any:
    """The part of that name, None where there is none: a config of the user's own may leave out what it likes."""
    for part in name.split("."):
        tree = tree[part] if tree is not None and part in tree else None
    return OmegaConf.to_container(tree) if OmegaConf.is_config(tree) else tree

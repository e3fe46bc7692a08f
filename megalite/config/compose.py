"""From a command line to a checked config: every mistake is found, and told in one UserError.

Hydra stops at its first error, so each override is examined on its own against the schema; Hydra then composes those
that passed, and the rules judge the result. Imports neither torch nor any data library. Nothing is written.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from megalite.config.arguments import Arguments, read_arguments
from megalite.config.derive import derive
from megalite.config.overrides import Examination
from megalite.config.problems import Problem, UserError
from megalite.config.rules import check
from megalite.config.schema import Config
from megalite.config.secrecy import ADVICE, HIDDEN, secret_value
from megalite.config.settings import SETTINGS, from_plain, value_of, yaml_value
from megalite.config.typed import typed_settings

CONF = Path(__file__).resolve().parents[2] / "conf"
SCHEMA = "megalite_schema"  # the name under which conf/config.yaml finds the schema

# Hydra's own folders and working directory: one process per rank must leave nothing of them on disk.
FIXED_HYDRA_SETTINGS: dict[str, Any] = {
    "hydra.run.dir": ".",
    "hydra.output_subdir": None,
    "hydra.job.chdir": False,
    "hydra.callbacks": {},
}

_VARIABLE = re.compile(r"\$\{oc\.env:\s*([^,}\s]+)\s*\}")  # one that nothing is written for in case it is not set


def register_schema() -> None:
    """Lets Hydra check every key and type of conf/ and of overrides against the schema."""
    ConfigStore.instance().store(name=SCHEMA, node=typed_settings())


def load_config(argv: list[str], world_size: int) -> Config:
    """The derived, checked config of a command line, or a UserError with every problem in it."""
    config, problems, doubtful = _read(argv)
    if config is not None:
        problems += check(config, world_size, doubtful)
    if problems or config is None:
        raise UserError(problems)
    return derive(config, world_size)


def show_information(argv: list[str]) -> int:
    """Answers --help, --cfg job and the like through Hydra, once every override is known to be right."""
    arguments, _ = read_arguments(argv)
    _, problems, _ = _read(argv)
    if problems:
        raise UserError(problems)
    parser = get_args_parser()
    parsed, _ = parser.parse_known_args(argv)  # --version prints and exits here
    parsed.overrides, parsed.config_path = arguments.overrides, arguments.config_path
    _run_hydra(parsed, parser, lambda config: None, config_path=str(CONF), config_name="config")
    return 0


def _read(argv: list[str]) -> tuple[Config | None, list[Problem], set[str]]:
    """The config as far as it can be composed, what is wrong with each word, and the settings left in doubt."""
    arguments, problems = read_arguments(argv)
    with hydra_loader(arguments) as loader:
        examination = Examination(loader, arguments)
        for override in arguments.overrides:
            examination.examine(override)
        composed, found = _compose(loader, arguments, examination.accepted)
    problems += examination.problems + found
    if composed is None:
        return None, problems, set()
    config, unresolved = _to_config(composed, examination.doubtful, arguments.config_name)
    doubtful = examination.doubtful | {problem.setting for problem in found + unresolved}
    return config, problems + unresolved, doubtful


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
    except (HydraException, OmegaConfBaseException):
        pass  # which override it was is found below
    accepted: list[str] = []
    try:
        composed = _compose_once(loader, arguments, accepted)
    except (HydraException, OmegaConfBaseException) as error:
        name = arguments.config_name
        problem = Problem(
            "--config-name", name, _first_words(error), "leave it out for conf/config.yaml, or mend the file"
        )
        return None, [problem]
    for override in overrides:
        try:
            composed = _compose_once(loader, arguments, [*accepted, override])
            accepted.append(override)
        except (HydraException, OmegaConfBaseException) as error:
            name, _, value = override.partition("=")
            problems.append(Problem(name, value, _first_words(error), "see docs/configuration.md, or --help"))
    return composed, problems


def _compose_once(loader: Any, arguments: Arguments, overrides: list[str]) -> DictConfig:
    composed = loader.load_configuration(
        arguments.config_name, [*arguments.search_path, *overrides], run_mode=RunMode.RUN, from_shell=False
    )
    assert isinstance(composed, DictConfig)
    return composed


def _first_words(error: BaseException) -> str:
    """What Hydra says, with the cause that it hides, in one line; only its first sentence tells something."""
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
    for name, setting in SETTINGS.items():
        if problem := _unresolved(composed, name, _plain(written, name)):
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


def _unresolved(composed: DictConfig, name: str, written: Any) -> Problem | None:
    """The problem of a value that is left open (`???`) or that refers (`${...}`) to nothing or to another type."""
    setting, refers = SETTINGS[name], "${" in str(written)
    instead = f"{'a value' if setting.default is None else f'{name}={yaml_value(setting.default)}'} in place of "
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
            OmegaConf.update(typed_settings(), name, value)
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
        yield Problem(
            "hydra.mode", composed.hydra.mode.name, "sweeps are not run in one process", "start one run per setting"
        )


def _plain(tree: Any, name: str) -> Any:
    """The part of that name, None where there is none: a config of the user's own may leave out what it likes."""
    for part in name.split("."):
        tree = tree[part] if tree is not None and part in tree else None
    return OmegaConf.to_container(tree) if OmegaConf.is_config(tree) else tree

"""From a command line to a checked config: every mistake is found, and all are in one UserError.

Hydra composes the files that are chosen. Then each override is set by itself, and the rules judge the result. Imports
neither torch nor any data library. Nothing is written.
"""

import io
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.errors import MissingConfigException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from megalite.config.arguments import read_arguments, shown
from megalite.config.bounds import bounds
from megalite.config.derive import derive
from megalite.config.inherited import is_of_run, of_recipe, of_run, of_weights
from megalite.config.overrides import as_override, assign, choices_of, read_override, settings_named
from megalite.config.rules import check, unused
from megalite.config.schema import Config
from megalite.config.secrecy import ADVICE, HIDDEN, secret_name, secret_value
from megalite.config.settings import (
    EXPERIMENT,
    GROUPS,
    SETTINGS,
    flat,
    typed_settings,
    value_of,
    with_values,
    yaml_value,
)
from megalite.config.suggest import nearest_setting
from megalite.config.user_files import read_yaml
from megalite.errors.problems import NO_VALUE, Problem, UserError, collect, shortened
from megalite.errors.remedies import nearest

PACKAGE = Path(__file__).resolve().parents[1]
CONF = folder if (folder := PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"  # of a wheel; of a checkout
SCHEMA = "megalite_schema"  # the name under which conf/config.yaml finds the schema
MEND = "mend the file, or choose another; see docs/configuration.md"

_VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}  # Hydra 1.4 warns of it
_VARIABLE = re.compile(r"oc\.env\s*:\s*['\"]?([^,}\s'\"]+)")


class _Reading(NamedTuple):
    """What a command line amounts to. `config` is None where its files cannot be composed."""

    config: Config | None
    problems: list[Problem]
    doubtful: set[str]  # settings that were refused: what they were to be, nobody knows
    inherited: list[str]  # overrides that a folder or a recipe gives


class Files(NamedTuple):
    """Where Hydra finds what it composes: folders, the first before the others, and the name of the config to begin
    with. `recipe`: the config.yaml of a run, whose settings come on top."""

    folders: list[str]
    name: str
    recipe: Path | None


class _YamlFiles(FileConfigSource):
    """Files of a folder as Hydra reads them, except those whose aliases stand for more than memory holds."""

    @staticmethod
    def scheme() -> str:
        return "yaml"

    def load_config(self, config_path: str) -> ConfigResult:
        with suppress(FileNotFoundError):
            path = Path(self.path, self._normalize_file_name(config_path))
            if b"*" in path.read_bytes():
                read_yaml(path, MEND)
        return super().load_config(config_path)


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
    inherited: list[str] = []
    if not arguments.shell_completion:  # which has words of its own
        _, problems, _, inherited = _read(arguments)
        if problems:
            raise UserError(problems)
    output = io.StringIO()
    with redirect_stdout(output):
        status = run_hydra([*inherited, *arguments.overrides, *shown(arguments)], lambda config: None, arguments)
    with suppress(OSError):  # `--help | head`, a full disk
        print(output.getvalue(), end="", flush=True)
    return status


def run_hydra(words: Sequence[str], function: Callable[[DictConfig], Any], arguments: Namespace) -> int:
    """Lets Hydra itself read a command line, and call the function if that is for it; the exit status. `arguments`
    say where its files are."""
    folders, name, _ = files_of(arguments)
    # Hydra looks for the config itself before it knows of other folders.
    first = next((folder for folder in folders if Path(folder, f"{name}.yaml").is_file()), folders[0])
    others = [f"file://{folder}" for folder in folders if folder != first]
    also = [f"hydra.searchpath={as_override(others)}"] if others else []
    given, sys.argv[1:] = sys.argv[1:], [*also, *words]
    try:
        hydra.main(config_path=first, config_name=name, **_VERSION_BASE)(function)()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv[1:] = given
    return 0


def files_of(arguments: Namespace) -> Files:
    """The user's own files come before those of the same name in conf/."""
    name, main = (arguments.config_name or "config").removesuffix(".yaml"), arguments.config_path or str(CONF)
    folders = [folder for folder in (arguments.config_dir, main) if folder]
    paths = [Path(folder, f"{name}.yaml") for folder in folders]
    chosen = next((path for path in paths if path.is_file()), None)
    if chosen is None or not is_of_run(chosen):
        return Files(folders, name, None)
    return Files([str(CONF), *(folder for folder in folders if folder != str(CONF))], "config", chosen)


def hydra_loader(files: Files) -> ConfigLoader:
    """Hydra's config loader, wherever the command is given. It checks every key and type against the schema."""
    _set_up_hydra()
    first, *others = (f"{_YamlFiles.scheme()}://{folder}" for folder in files.folders)
    search = create_config_search_path(first)
    for folder in others:
        search.prepend("command-line", folder, anchor="schema")
    SourcesRegistry.instance().register(_YamlFiles)
    return ConfigLoaderImpl(search)


@cache
def _set_up_hydra() -> None:
    """The resolvers and the schema that conf/ refers to; a second registration is an error of Hydra 1.5."""
    for base in _VERSION_BASE.values():
        version.setbase(base)
    setup_globals()
    ConfigStore.instance().store(name=SCHEMA, node=typed_settings())


def in_one_line(error: Exception) -> str:
    """What Hydra or OmegaConf says, without its notes on where in the tree and on which folders it has searched."""
    said = str(error).partition("\n    full_key")[0].partition("Config search path")[0]
    return shortened(" ".join(said.split()) or type(error).__name__)


def _read(arguments: Namespace) -> _Reading:
    problems: list[Problem] = []
    files = files_of(arguments)
    loader = hydra_loader(files)
    read = (collect(partial(read_override, text, loader), problems) for text in arguments.overrides)
    overrides = [override for override in read if override is not None]
    choices = [override for override in overrides if choices_of(override, loader)]
    words = [str(override.input_line) for override in choices]
    composed = collect(partial(_compose, loader, files, words), problems)
    tree = typed_settings() if composed is None else composed  # in which the other overrides can be checked, too
    by_files = _written(tree)
    for override in overrides:
        problems += assign(tree, override) if override not in choices else ()
    by_command = _written(tree)
    named = set[str]().union(*map(settings_named, overrides))
    of_folder = partial(of_weights, asked=any(override.get_key_element() == "tokenizer" for override in overrides))
    inherited, told = list[str](), list[str]()
    sources: dict[str, Callable[..., list[str]]] = {"as before": of_run, "from the weights": of_folder}
    if arguments.config_name or arguments.config_path or files.recipe:  # which take nothing from elsewhere
        sources = {f"from {files.recipe}": partial(of_recipe, files.recipe)} if files.recipe else {}
    for words_for_it, source in sources.items() if composed is not None else ():
        texts = collect(partial(source, tree, named), problems) or []
        for text in texts:
            problems += assign(tree, OverridesParser.create().parse_override(text))
        inherited += texts
        told += [f"{words_for_it}: {', '.join(texts)}"] * bool(texts)
    meant = {nearest_setting(name) or name for name in (problem.setting.lstrip("+~") for problem in problems)}
    doubtful = {*SETTINGS} if EXPERIMENT in meant else meant  # no one knows what a recipe was to set
    if composed is None:
        return _Reading(None, problems, doubtful, [])
    values, unresolved = _resolved(tree)
    doubtful |= {problem.setting for problem in unresolved}
    departures = tuple(name for name in SETTINGS if by_command[name] != by_files[name])
    config = replace(with_values(Config(), values), told=tuple(told), departures=departures)
    return _Reading(config, problems + unresolved, doubtful, inherited)


def _compose(loader: ConfigLoader, files: Files, choices: list[str]) -> DictConfig:
    """The settings as the files give them; UserError with what Hydra makes of a file that is wrong."""

    def tree(*chosen: str) -> DictConfig:
        composed = loader.load_configuration(files.name, list(chosen), run_mode=RunMode.RUN, from_shell=False)
        with open_dict(composed):
            del composed["hydra"]
        settings = typed_settings()
        settings.merge_with(composed)  # a config of the user's own may leave the schema out
        return settings

    try:
        return tree(*choices)
    except Exception as error:  # no YAML, no UTF-8, no permission, too deep, no mapping, no such key
        raise UserError(_of_wrong_file(error, tree, files, choices)) from error


def _of_wrong_file(error: Exception, tree: Callable[..., Any], files: Files, choices: list[str]) -> list[Problem]:
    """The first of the chosen files that cannot be composed alone."""
    name = f"--config-name={files.name}"
    for alone in ("", *choices):
        try:
            tree(*filter(None, [alone]))
        except UserError as of_file:
            return of_file.problems
        except Exception as wrong:
            if isinstance(wrong, MissingConfigException) and wrong.missing_cfg_file == files.name:
                there = sorted({path.stem for folder in files.folders for path in Path(folder).glob("*.yaml")})
                rule = f"there is no {files.name}.yaml in {' or '.join(files.folders)}"
                remedy = f"--config-name={nearest(files.name, there, cutoff=0) or 'config'}, or --config-dir=FOLDER"
                return [Problem(name, NO_VALUE, rule, remedy)]
            return [Problem(alone or name, NO_VALUE, in_one_line(wrong), MEND)]
    return [Problem(" ".join(choices), NO_VALUE, in_one_line(error), MEND)]


def _written(tree: DictConfig) -> dict[str, Any]:
    """The settings as they are written, before interpolations are resolved."""
    return flat(OmegaConf.to_container(tree))  # type: ignore[arg-type]


def _resolved(tree: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """The values with interpolations resolved; those that do not resolve become problems and defaults."""
    problems, values = [], typed_settings()
    for name, written in _written(tree).items():
        problem = None
        if secret := [one for one in _VARIABLE.findall(str(written)) if "$" in one or secret_name(one)]:
            rule = f"the environment variable {secret[0]} may hold a secret, and run folders keep the config"
            problem = Problem(name, written, rule, ADVICE)
        else:
            try:
                value = OmegaConf.select(tree, name, throw_on_missing=True)
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
                OmegaConf.update(values, name, value)
                if secret_value(str(value)):  # it came in by a file or by ${oc.env:NAME}
                    problem = Problem(name, HIDDEN, "looks like a secret, and run folders keep the config", ADVICE)
            except OmegaConfBaseException as error:
                remedy = f"{name}={yaml_value(SETTINGS[name].default)} in place of {written}"
                problem = Problem(name, written, in_one_line(error), remedy)
        if problem:
            problems.append(problem)
            OmegaConf.update(tree, name, SETTINGS[name].default)  # others may refer to it
    return _written(values), problems

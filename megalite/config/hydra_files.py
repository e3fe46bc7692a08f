"""Finds and composes config files, and shows what they hold, by the public API of Hydra.

A folder of the user's own (--config-dir) comes before conf/, or before the folder of --config-path.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import OmegaConf

from megalite.config.inherited import is_of_run
from megalite.config.settings import EXPERIMENT, GROUPS
from megalite.config.user_files import MOST_VALUES, explodes, read_bytes
from megalite.errors.problems import NO_VALUE, Problem, UserError, shortened
from megalite.errors.remedies import nearest

PACKAGE = Path(__file__).resolve().parents[1]
CONF = folder if (folder := PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"  # of a wheel; of a checkout
SCHEMA = "megalite_schema"  # named by conf/config.yaml and copies of it; what is no setting is refused here
MEND = "mend the file, or choose another; see docs/configuration.md"

_VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}  # Hydra 1.4 warns of it


class Files(NamedTuple):
    """Where Hydra looks: `main` holds the config to begin with, `own` files that come before those of the same name.
    `recipe`: the config.yaml of a run, whose settings come on top."""

    main: str
    name: str
    own: str | None = None
    recipe: Path | None = None


class _OwnFolder(SearchPathPlugin):
    """Puts the user's own folder before the main one."""

    folder: ClassVar[str | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.folder is not None:
            search_path.prepend("own", f"file://{self.folder}", anchor="main")


def files_of(arguments: Namespace) -> Files:
    """The files that a command line asks for."""
    name, own = (arguments.config_name or "config").removesuffix(".yaml"), arguments.config_dir
    main = arguments.config_path or str(CONF)
    paths = (Path(folder, f"{name}.yaml") for folder in (own, main) if folder)
    chosen = next((path for path in paths if path.is_file()), None)
    if chosen is None or not is_of_run(chosen):
        return Files(main, name, own)
    return Files(str(CONF), "config", own if own and not Path(own, "config.yaml").is_file() else None, chosen)


def hydra_loader(files: Files) -> ConfigLoader:
    """Hydra's config loader, wherever the command is given; within a run of Hydra, too."""
    around = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    _look_in(files)
    try:
        with hydra.initialize_config_dir(files.main, "pretrain_gpt", **_VERSION_BASE):
            return GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().hydra = around


def run_hydra(words: Sequence[str], function: Callable[[Any], Any], arguments: Namespace) -> int:
    """Lets Hydra itself read a command line, and call the function if that is for it; the exit status. `arguments`
    say where its files are."""
    files = files_of(arguments)
    _look_in(files)
    given, sys.argv[1:] = sys.argv[1:], [*words]
    try:
        hydra.main(config_path=files.main, config_name=files.name, **_VERSION_BASE)(function)()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv[1:] = given
    return 0


def _look_in(files: Files) -> None:
    _OwnFolder.folder = files.own
    Plugins.instance().register(_OwnFolder)
    if f"{SCHEMA}.yaml" not in ConfigStore.instance().list(""):  # Hydra 1.5 refuses it a second time
        ConfigStore.instance().store(name=SCHEMA, node={})


def composed(loader: ConfigLoader, files: Files, choices: list[str]) -> dict[Any, Any]:
    """The settings in the chosen files, as nested dictionaries before interpolations are resolved; UserError for a file
    that Hydra cannot read."""
    bombs = list[Problem]()
    for path in _own_files(files):
        with suppress(UserError):  # Hydra refuses the file, where it is chosen
            if b"*" in (content := read_bytes(path)) and explodes(content):
                rule = f"stands for more than {MOST_VALUES:,} values (aliases of aliases)"
                bombs.append(Problem(str(path), NO_VALUE, rule, MEND, here=True))
    if bombs:
        raise UserError(bombs)

    def compose(*chosen: str) -> dict[Any, Any]:
        found = loader.load_configuration(files.name, [*chosen], run_mode=RunMode.RUN, from_shell=False)
        plain: Any = OmegaConf.to_container(found)
        return {name: value for name, value in plain.items() if name != "hydra"}

    try:
        return compose(*choices)
    except Exception as error:  # no YAML, no UTF-8, no permission, too deep, no mapping
        raise UserError(_of_wrong_file(error, compose, files, choices)) from error


def _own_files(files: Files) -> Iterator[Path]:
    """The YAML files that Hydra may read from the user's folders."""
    for folder in (Path(each) for each in (files.own, files.main) if each and each != str(CONF)):
        yield from folder.glob("*.yaml")
        yield folder / f"{files.name}.yaml"
        for group in (*GROUPS, EXPERIMENT):
            yield from (folder / group).glob("*.yaml")


def _of_wrong_file(error: Exception, compose: Callable[..., Any], files: Files, choices: list[str]) -> Problem:
    """The first of the chosen files that cannot be composed alone."""
    name = f"--config-name={files.name}"
    for alone in ([], *([choice] for choice in choices)):
        try:
            compose(*alone)
        except Exception as wrong:
            if isinstance(wrong, MissingConfigException) and wrong.missing_cfg_file == files.name:
                folders = [folder for folder in (files.own, files.main) if folder]
                there = sorted({path.stem for folder in folders for path in Path(folder).glob("*.yaml")})
                rule = f"there is no {files.name}.yaml in {' or '.join(folders)}"
                remedy = f"--config-name={nearest(files.name, there, cutoff=0) or 'config'}, or --config-dir=FOLDER"
                return Problem(name, NO_VALUE, rule, remedy)
            return Problem(alone[0] if alone else name, NO_VALUE, in_one_line(wrong), MEND)
    return Problem(" ".join(choices), NO_VALUE, in_one_line(error), MEND)


def in_one_line(error: Exception) -> str:
    """The message of an error of Hydra or OmegaConf, without the notes on where it has searched."""
    said = str(error).partition("\n    full_key")[0].partition("Config search path")[0]
    return shortened(" ".join(said.split()) or type(error).__name__)

"""Config files: Hydra finds and composes them, shows what they hold, and sweeps."""

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalite.config.settings import DERIVED, leaves
from megalite.config.user_files import read_yaml, refusing
from megalite.errors.problems import UserError, shortened

PACKAGE = Path(__file__).resolve().parents[1]
CONF = folder if (folder := PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"  # of a wheel; of a checkout
SCHEMA = "megalite_schema"  # named by conf/config.yaml and copies of it; what is no setting is refused here
MEND = "mend the file, or choose another; see docs/configuration.md"

_VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}  # Hydra 1.4 warns of it


class Files(NamedTuple):
    """Folders like conf/, of which the first that has a file counts, and the name of the config to begin with.
    `recipe`: the config.yaml of a run, whose settings come on top."""

    folders: tuple[str, ...]
    name: str
    recipe: Path | None = None

    def options(self, group: str) -> list[str]:
        """The names of a group's files."""
        return sorted({path.stem for folder in self.folders for path in Path(folder, group).glob("*.yaml")})


def files_of(arguments: Namespace) -> Files:
    """The files that a command line asks for."""
    name, main = (arguments.config_name or "config").removesuffix(".yaml"), arguments.config_path or str(CONF)
    files = Files((arguments.config_dir, main) if arguments.config_dir else (main,), name)
    chosen = next((path for folder in files.folders if (path := Path(folder, f"{name}.yaml")).exists()), None)
    with suppress(UserError):  # refused by whoever composes the file
        if chosen is not None and chosen.parent != CONF and DERIVED in read_yaml(chosen):
            others = [folder for folder in files.folders if folder not in (str(chosen.parent), str(CONF))]
            return Files((*others, str(CONF)), "config", chosen)
    return files


def composed(files: Files, choices: Mapping[str, str]) -> dict[str, Any]:
    """The settings in the files of the command's choices, by dotted names, before interpolations are resolved.
    UserError for a file that cannot be read."""
    words = [f"{group}={choice}" for group, choice in choices.items()]
    sweeping = GlobalHydra.instance().is_initialized()  # by the same files
    start = partial(hydra.initialize_config_dir, _main_folder(files), "pretrain_gpt", **_VERSION_BASE)
    with refusing(" ".join([f"--config-name={files.name}", *words]), MEND), nullcontext() if sweeping else start():
        try:
            return leaves(cast(dict[str, Any], OmegaConf.to_container(hydra.compose(files.name, words))))
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(in_one_line(error)) from error


class _OwnFolders(SearchPathPlugin):
    """Puts the folders of the user before the main one, which is the last."""

    folders: ClassVar[Sequence[str]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in self.folders:
            search_path.prepend("own", f"file://{folder}", anchor="main")


def _main_folder(files: Files) -> str:
    """Hydra's main folder, when it knows all others."""
    *_OwnFolders.folders, main = files.folders
    Plugins.instance().register(_OwnFolders)
    if f"{SCHEMA}.yaml" not in ConfigStore.instance().list(""):  # Hydra 1.5 refuses it a second time
        ConfigStore.instance().store(name=SCHEMA, node={})
    return main


def hydra_loader(files: Files) -> ConfigLoader:
    """Hydra's config loader."""
    with hydra.initialize_config_dir(_main_folder(files), "pretrain_gpt", **_VERSION_BASE):
        return GlobalHydra.instance().config_loader()


def run_hydra(words: Sequence[str], function: Callable[[Any], Any], arguments: Namespace) -> int:
    """Lets Hydra itself read a command line, and call the function if that is for it; the exit status. `arguments`
    say where its files are."""
    files = files_of(arguments)
    given, sys.argv[1:] = sys.argv[1:], [*words]
    try:
        hydra.main(config_path=_main_folder(files), config_name=files.name, **_VERSION_BASE)(function)()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv[1:] = given
    return 0


def in_one_line(error: Exception) -> str:
    """The message of an error of Hydra or OmegaConf, without the notes on where it has searched."""
    said = (str(error) or str(error.__cause__)).partition("\n    full_key")[0].partition("Config search path")[0]
    return shortened(" ".join(said.split()) or type(error).__name__)

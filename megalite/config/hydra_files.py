"""Finds config files and composes them, as Hydra does; lets Hydra itself show what they hold, and sweep.

A file's list of `defaults` names files that count before it (`_self_` says where it counts itself).
"""

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from megalite.config.settings import DERIVED, EXPERIMENT, leaves
from megalite.config.user_files import read_text, read_yaml, refusing
from megalite.errors.problems import NO_VALUE, Problem, UserError, shortened
from megalite.errors.remedies import nearest

PACKAGE = Path(__file__).resolve().parents[1]
CONF = folder if (folder := PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"  # of a wheel; of a checkout
SCHEMA = "megalite_schema"  # named by conf/config.yaml and copies of it; what is no setting is refused here
MEND = "mend the file, or choose another; see docs/configuration.md"
_SELF, _OVERRIDE = "_self_", "override "

_VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}  # Hydra 1.4 warns of it


class Files(NamedTuple):
    """Folders like conf/, of which the first that has a file counts, and the name of the config to begin with.
    `recipe`: the config.yaml of a run, whose settings come on top."""

    folders: tuple[str, ...]
    name: str
    recipe: Path | None = None

    def find(self, group: str, name: str) -> Path | None:
        """The file of a group, or of none (``)."""
        paths = (Path(folder, group, f"{name}.yaml") for folder in self.folders)
        return next((path for path in paths if path.exists()), None)

    def options(self, group: str) -> list[str]:
        """The names of a group's files."""
        return sorted({path.stem for folder in self.folders for path in Path(folder, group).glob("*.yaml")})


def files_of(arguments: Namespace) -> Files:
    """The files that a command line asks for."""
    name, main = (arguments.config_name or "config").removesuffix(".yaml"), arguments.config_path or str(CONF)
    files = Files((arguments.config_dir, main) if arguments.config_dir else (main,), name)
    chosen = files.find("", name)
    with suppress(UserError):  # refused by whoever composes the file
        if chosen is not None and chosen.parent != CONF and DERIVED in read_yaml(chosen):
            others = [folder for folder in files.folders if folder not in (str(chosen.parent), str(CONF))]
            return Files((*others, str(CONF)), "config", chosen)
    return files


def composed(files: Files, chosen: Mapping[str, str]) -> dict[str, Any]:
    """The settings in the files of the command's choices, by dotted names, before interpolations are resolved.
    UserError for a file that cannot be read."""
    read, choices = cache(partial(_file, files)), dict[str, Any](chosen)

    def walk(group: str, name: str) -> Iterator[tuple[str, Any]]:
        """Names and values in a file and in those that it names, in the order in which they count."""
        entries, values = read(group, name)
        for key, choice in entries:
            if key.startswith(_OVERRIDE):  # a file's own count more than those of the files that it builds on
                choices.setdefault(key.removeprefix(_OVERRIDE).removeprefix("/"), choice)
        for key, default in entries:
            inner = key.removeprefix("/") if not group or key.startswith("/") else f"{group}/{key}"
            if key == _SELF:
                yield from values.items()
            elif not key and default != SCHEMA:
                yield from walk(group, default)
            elif key and not key.startswith(_OVERRIDE) and (choice := choices.get(inner, default)) is not None:
                yield from walk(inner, choice)

    with refusing(f"--config-name={files.name}", MEND):  # files may name each other
        list(walk("", files.name))  # for the choices, which may be of files before
        return {name: value for name, value in walk("", files.name) if not name.startswith("hydra.")}


def _file(files: Files, group: str, name: str) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """The list of defaults in a file, as groups (none: the same) and choices, and the values in it by dotted names."""
    if (path := files.find(group, name)) is None:
        flag, near = group or "--config-name", nearest(str(name), files.options(group), cutoff=0)
        rule = f"there is no {f'{group}/' * bool(group)}{name}.yaml in {' or '.join(files.folders)}"
        raise UserError(Problem(f"{flag}={name}", NO_VALUE, rule, f"{flag}={near or 'config'}, or --config-dir=FOLDER"))
    text, content = read_text(path, MEND), read_yaml(path, MEND)
    with refusing(path, MEND):
        defaults = content.pop("defaults", []) if isinstance(content, dict) else None
        if not isinstance(defaults, list) or not all(isinstance(entry, str | dict) for entry in defaults):
            raise ValueError("holds no settings, or no list of defaults")
        items = [entry.items() if isinstance(entry, dict) else [("", entry)] for entry in defaults]
        entries = [(_SELF if choice == _SELF else str(key), choice) for each in items for key, choice in each]
        if group not in ("", EXPERIMENT) and any(key.startswith((_OVERRIDE, "/")) for key, _ in entries):
            raise ValueError("chooses files of other groups, as only a recipe may")
    named = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
    package = named[1].replace("_global_", "").replace("_group_", group) if named else group
    values = leaves(content, f"{package.replace('/', '.')}." if package else "")
    return entries if _SELF in defaults else [*entries, (_SELF, None)], values


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
    said = str(error).partition("\n    full_key")[0].partition("Config search path")[0]
    return shortened(" ".join(said.split()) or type(error).__name__)

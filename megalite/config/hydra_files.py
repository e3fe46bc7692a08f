"""Finds config files and composes them, as Hydra does; lets Hydra itself show what they hold, and sweep.

A file's list of `defaults` names files that count before it (`_self_` says where it counts itself). A folder of the
user's own (--config-dir) comes before conf/, or before the folder of --config-path.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
    """Where to look: `main` holds the config to begin with, `own` files that come before those of the same name.
    `recipe`: the config.yaml of a run, whose settings come on top."""

    main: str
    name: str
    own: str | None = None
    recipe: Path | None = None

    @property
    def folders(self) -> list[str]:
        """Where to look, the user's own folder first."""
        return [folder for folder in (self.own, self.main) if folder]

    def find(self, group: str, name: str) -> Path | None:
        """The file of a group, or of none (``)."""
        paths = (Path(folder, group, f"{name}.yaml") for folder in self.folders)
        return next((path for path in paths if path.exists()), None)

    def options(self, group: str) -> list[str]:
        """The names of a group's files."""
        return sorted({path.stem for folder in self.folders for path in Path(folder, group).glob("*.yaml")})


def files_of(arguments: Namespace) -> Files:
    """The files that a command line asks for."""
    name, own = (arguments.config_name or "config").removesuffix(".yaml"), arguments.config_dir
    files = Files(arguments.config_path or str(CONF), name, own)
    chosen = files.find("", name)
    with suppress(UserError):  # refused by whoever composes the file
        if chosen is not None and chosen.parent != CONF and DERIVED in read_yaml(chosen):
            return Files(str(CONF), "config", own if own and not Path(own, "config.yaml").is_file() else None, chosen)
    return files


def composed(files: Files, chosen: Mapping[str, str]) -> dict[str, Any]:
    """The settings in the files of the command's choices, by dotted names, before interpolations are resolved.
    UserError for a file that cannot be read."""
    with refusing(f"--config-name={files.name}", MEND):  # files may name each other
        choices = _choices(files, "", files.name)
        if recipe := chosen.get(EXPERIMENT, choices.get(EXPERIMENT)):
            choices |= _choices(files, EXPERIMENT, recipe)
        found = dict(_settings(files, "", files.name, choices | dict(chosen)))
    return {name: value for name, value in found.items() if not name.startswith("hydra.")}


def _choices(files: Files, group: str, name: str) -> dict[str, Any]:
    """The choices by group in a file's list of defaults, and before them those of the files that it builds on."""
    defaults, chosen = _file(files, group, name)[0], dict[str, Any]()
    for entry in defaults:
        if isinstance(entry, str) and entry not in (_SELF, SCHEMA):
            chosen |= _choices(files, group, entry)
    own = [item for entry in defaults if isinstance(entry, dict) for item in entry.items()]
    return chosen | {key.removeprefix(_OVERRIDE).removeprefix("/"): choice for key, choice in own}


def _settings(files: Files, group: str, name: str, choices: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values in a file and in those that it names, in the order in which they count."""
    defaults, values = _file(files, group, name)
    for entry in defaults if _SELF in defaults else [*defaults, _SELF]:
        if entry == _SELF:
            yield from values.items()
        elif isinstance(entry, str) and entry != SCHEMA:
            yield from _settings(files, group, entry, choices)
        for key, default in entry.items() if isinstance(entry, dict) else ():
            inner = key.removeprefix("/") if not group or key.startswith("/") else f"{group}/{key}"
            choice = choices.get(inner, default)
            if choice is not None and not key.startswith(_OVERRIDE):
                yield from _settings(files, inner, choice, choices)


def _file(files: Files, group: str, name: str) -> tuple[list[Any], dict[str, Any]]:
    """The list of defaults in a file, and the values in it by dotted names."""
    if (path := files.find(group, name)) is None:
        flag, near = group or "--config-name", nearest(str(name), files.options(group), cutoff=0)
        rule = f"there is no {f'{group}/' * bool(group)}{name}.yaml in {' or '.join(files.folders)}"
        raise UserError(Problem(f"{flag}={name}", NO_VALUE, rule, f"{flag}={near or 'config'}, or --config-dir=FOLDER"))
    text, content = read_text(path, MEND), read_yaml(path, MEND)
    with refusing(path, MEND):
        defaults = content.pop("defaults", []) if isinstance(content, dict) else None
        if not isinstance(defaults, list) or not all(
            isinstance(key, str) for entry in defaults for key in entry or [0]
        ):
            raise ValueError("holds no settings, or no list of defaults")
        keys = [key for entry in defaults if isinstance(entry, dict) for key in entry]
        if group not in ("", EXPERIMENT) and any(key.startswith((_OVERRIDE, "/")) for key in keys):
            raise ValueError("chooses files of other groups, as only a recipe may")
    named = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
    package = named[1].replace("_global_", "").replace("_group_", group) if named else group
    return defaults, leaves(content, f"{package.replace('/', '.')}." if package else "")


class _OwnFolder(SearchPathPlugin):
    """Puts the user's own folder before the main one."""

    folder: ClassVar[str | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.folder is not None:
            search_path.prepend("own", f"file://{self.folder}", anchor="main")


def hydra_loader(files: Files) -> ConfigLoader:
    """Hydra's config loader."""
    _look_in(files)
    with hydra.initialize_config_dir(files.main, "pretrain_gpt", **_VERSION_BASE):
        return GlobalHydra.instance().config_loader()


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


def in_one_line(error: Exception) -> str:
    """The message of an error of Hydra or OmegaConf, without the notes on where it has searched."""
    said = str(error).partition("\n    full_key")[0].partition("Config search path")[0]
    return shortened(" ".join(said.split()) or type(error).__name__)

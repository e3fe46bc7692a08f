"""Where Hydra finds presets of a user's own: --config-dir and hydra.searchpath, which come behind conf/."""

import os
from collections.abc import Iterator
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from megalite.config.user_files import ALIASES, read_yaml
from megalite.errors.problems import Problem, UserError

SEARCH_PATH = "hydra.searchpath="
LARGEST = 2**20  # bytes of a preset; what aliases make of it is another matter


def listed_folders(text: str) -> list[str]:
    """The folders of an override `hydra.searchpath=[...]`."""
    try:
        found = OverridesParser.create().parse_override(text).value()
    except HydraException:
        found = None
    folders = [str(folder).removeprefix("file://") for folder in found] if isinstance(found, list) else [""]
    if not all(os.path.isdir(folder) for folder in folders):
        remedy = f"{SEARCH_PATH}[FOLDER], or --config-dir FOLDER"
        raise UserError(Problem(SEARCH_PATH[:-1], text.removeprefix(SEARCH_PATH), "is no list of folders", remedy))
    return folders


def bombs(folder: str) -> Iterator[Problem]:
    """Files there whose aliases stand for more than there is memory for: Hydra would write them all out."""
    for path in sorted([*Path(folder).glob("*.yaml"), *Path(folder).glob("*/*.yaml")]):
        try:
            if os.path.isfile(path) and os.path.getsize(path) <= LARGEST:
                read_yaml(path)
        except (OSError, UserError) as error:  # what else is wrong with it counts if it is chosen
            yield from [it for it in getattr(error, "problems", []) if ALIASES in it.rule]

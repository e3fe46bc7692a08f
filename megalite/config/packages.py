"""Packages that only some commands and settings need. They are looked for, not imported: that takes seconds."""

from importlib.util import find_spec


def is_installed(package: str) -> bool:
    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # not even the package that it is in
        return False
    return found is not None and found.origin is not None  # a folder of that name, as wandb itself makes, has none

"""The command line split into Hydra's flags and the overrides.

Hydra's own parser decides what is a flag, so `--cfg job`, `--help`, `-cn` and the rest mean what Hydra's docs say.
"""

import os
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser

from megalite.config.secrecy import secret_name
from megalite.errors.problems import NO_VALUE, Problem, UserError

SHOWING = ("cfg", "info", "shell_completion", "help", "hydra_help")  # flags that ask Hydra to show something
FOLDERS = ("config_path", "config_dir")  # instead of conf/, beside it


def read_arguments(argv: Sequence[str]) -> Namespace:
    """The flags by name and `overrides`, all other words; UserError for flags that have no meaning here."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # it would print its usage and exit
    arguments, others = parser.parse_known_args(argv)
    words = [*arguments.overrides, *others]  # a + means something to Hydra's own settings alone
    arguments.overrides = [word if word.lstrip("+").startswith("hydra") else word.lstrip("+") for word in words]
    if any(secret_name(word.partition("=")[0]) for word in others):
        # `--api-key VALUE`: the bare word is the flag's value, and must not be repeated in another message.
        arguments.overrides = [word for word in arguments.overrides if "=" in word or word.startswith("-")]
    rivals = [_flag(name) for name in ("run", "multirun", *SHOWING[:3]) if getattr(arguments, name)]
    if len(rivals) > 1:
        _refuse(f"cannot be given with {' and '.join(rivals[1:])}", rivals[0], "one of them")
    if arguments.experimental_rerun:
        _refuse("Hydra's rerun loads a pickle, which can run code", "--experimental-rerun", "start the command again")
    for name in FOLDERS:
        if folder := getattr(arguments, name):
            if not os.path.isdir(folder):
                _refuse("there is no such folder", _flag(name), "FOLDER, of yaml files", folder)
            setattr(arguments, name, os.path.abspath(folder))
    return arguments


def flags(arguments: Namespace, names: Sequence[str]) -> list[str]:
    """The flags of these names as they are typed, those that were not given left out."""
    given = {_flag(name): getattr(arguments, name) for name in names}
    return [word for flag, value in given.items() if value for word in ([flag] if value is True else [flag, value])]


def sources(arguments: Namespace) -> list[str]:
    """The flags that lead another process to the same config files."""
    return flags(arguments, ("config_name", *FOLDERS))


def shown(arguments: Namespace) -> list[str]:
    """The flags that ask for something to be shown; empty where something is to be trained."""
    return flags(arguments, (*SHOWING, "resolve", "package")) if flags(arguments, SHOWING) else []


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse(message: str, flag: str = "command line", remedy: str = "see --help", value: Any = NO_VALUE) -> NoReturn:
    raise UserError(Problem(flag, value, message, remedy))

"""The command line: numbers with bounds, and Hydra's flags apart from the overrides.

Hydra's flags mean here what Hydra's documentation says; they are listed because Hydra's own parser is not public.
"""

import argparse
import math
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NoReturn

from megalite.config.numbers import whole_number
from megalite.errors.problems import NO_VALUE, Problem, UserError

SHOWING = ("cfg", "info", "shell_completion", "help", "hydra_help", "version")  # flags that ask Hydra to show something
FILES = ("config_name", "config_path", "config_dir")  # flags that choose config files
MOST = 2**63 - 1  # the largest number that an option takes


class Parser(argparse.ArgumentParser):
    """A parser whose refusals are `UserError`s."""

    def error(self, message: str) -> NoReturn:
        raise UserError(Problem("command line", NO_VALUE, message, "see --help"))


def number_from(least: float, most: float = MOST, *, above: bool = False, whole: bool = True) -> Callable[[str], Any]:
    """A function that reads the number of an option, from `least` (or above it) to `most`."""

    def read(text: str) -> int | float:
        value: int | float = math.nan
        with suppress(ValueError):  # no number, or too many digits
            value = whole_number(text) if whole else float(text)
        if not least <= value <= most or (above and value == least):
            words = f"a {'whole number' if whole else 'number'} {'above' if above else 'from'} {least:,} to {most:,}"
            raise argparse.ArgumentTypeError(f"{text:.40} must be {words}")
        return value

    return read


def _folder(path: str) -> str:
    if not os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"there is no such folder: {path}")
    return os.path.abspath(path)


def read_arguments(argv: Sequence[str]) -> Namespace:
    """The flags by name and `overrides`, all other words; UserError for flags that have no meaning here."""
    parser = Parser(add_help=False)
    one_of = parser.add_mutually_exclusive_group()
    for flag in ("--run -r", "--multirun -m", "--shell-completion -sc"):
        one_of.add_argument(*flag.split(), action="store_true")
    one_of.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    one_of.add_argument("--info", "-i", nargs="?", const="all")
    for flag in ("--help -h", "--hydra-help", "--version", "--resolve"):
        parser.add_argument(*flag.split(), action="store_true")
    for flag in ("--package -p", "--config-name -cn"):
        parser.add_argument(*flag.split())
    for flag in ("--config-path -cp", "--config-dir -cd"):
        parser.add_argument(*flag.split(), type=_folder)
    parser.add_argument("overrides", nargs="*")
    arguments, others = parser.parse_known_args(argv)
    options = [word for word in others if word.startswith("-")]
    # `--api-key VALUE`: the bare word may be a secret, and must not be repeated in another message.
    hidden = {word for option, word in pairwise(argv) if option in options and "=" not in word} - {*options}
    words = [word for word in (*arguments.overrides, *others) if word not in hidden]
    # A + means something to Hydra's own settings alone.
    arguments.overrides = [word if word.lstrip("+").startswith("hydra") else word.lstrip("+") for word in words]
    return arguments


def flags(arguments: Namespace, names: Sequence[str] = FILES) -> list[str]:
    """The given flags of these names as they are typed; by default those that choose config files."""
    given = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in names}
    return [word for flag, value in given.items() if value for word in ([flag] if value is True else [flag, value])]


def shown(arguments: Namespace) -> list[str]:
    """The flags that ask for something to be shown; empty where something is to be trained."""
    return flags(arguments, (*SHOWING, "resolve", "package")) if flags(arguments, SHOWING) else []

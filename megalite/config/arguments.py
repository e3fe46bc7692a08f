"""The command line: numbers with bounds, options that are given once, and Hydra's flags apart from the overrides.

Hydra's flags mean here what Hydra's documentation says; they are listed because Hydra's own parser is not public.
"""

import argparse
import math
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import hydra

from megalite.errors.problems import NO_VALUE, Problem, UserError

SHOWING = ("cfg", "info", "shell_completion", "help", "hydra_help")  # flags that ask Hydra to show something
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
FOLDERS = ("config_path", "config_dir")  # instead of conf/, beside it
MOST = 2**63 - 1  # the largest number that an option takes


class Once(argparse.Action):
    """An option with one value. Where it is given twice, the last would take the place of the first without a word."""

    given = False

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        if self.given and self.option_strings:
            _refuse("is given twice", option_string or self.option_strings[0], "give it once", values)
        setattr(namespace, self.dest, values)
        self.given = True


def number_from(least: float, most: float = MOST, *, above: bool = False, whole: bool = True) -> Callable[[str], Any]:
    """A function that reads the number of an option, from `least` (or above it) to `most`."""

    def read(text: str) -> int | float:
        value: int | float = math.nan
        with suppress(ValueError):  # no number, or too many digits
            value = int(text) if whole else float(text)
        if not least <= value <= most or (above and value == least):
            words = f"a {'whole number' if whole else 'number'} {'above' if above else 'from'} {least:,} to {most:,}"
            raise argparse.ArgumentTypeError(f"{text:.40} must be {words}")
        return value

    return read


def parser_of(**settings: Any) -> argparse.ArgumentParser:
    """A parser whose options are given once, and that refuses as everything here does."""
    parser = argparse.ArgumentParser(**settings)
    parser.register("action", None, Once)
    parser.error = _refuse_argument  # type: ignore[method-assign]  # it would print its usage and exit
    return parser


def read_arguments(argv: Sequence[str]) -> Namespace:
    """The flags by name and `overrides`, all other words; UserError for flags that have no meaning here."""
    parser = parser_of(add_help=False)
    one_of = parser.add_mutually_exclusive_group()
    for flag in ("--run -r", "--multirun -m", "--shell-completion -sc"):
        one_of.add_argument(*flag.split(), action="store_true")
    one_of.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    one_of.add_argument("--info", "-i", nargs="?", const="all", choices=INFO)
    for flag in ("--help -h", "--hydra-help", "--resolve"):
        parser.add_argument(*flag.split(), action="store_true")
    for flag in ("--package -p", "--config-path -cp", "--config-name -cn", "--config-dir -cd"):
        parser.add_argument(*flag.split())
    parser.add_argument("--version", action="version", version=f"Hydra {hydra.__version__}")
    parser.add_argument("overrides", nargs="*")
    arguments, others = parser.parse_known_args(argv)
    words = [*arguments.overrides, *others]
    if others:  # `--api-key VALUE`: the bare word may be a secret, and must not be repeated in another message
        words = [word for word in words if "=" in word or word.startswith("-")]
    # A + means something to Hydra's own settings alone.
    arguments.overrides = [word if word.lstrip("+").startswith("hydra") else word.lstrip("+") for word in words]
    for name in FOLDERS:
        if folder := getattr(arguments, name):
            if not os.path.isdir(folder):
                _refuse("there is no such folder", _flag(name), "FOLDER, of yaml files", folder)
            setattr(arguments, name, os.path.abspath(folder))
    return arguments


def flags(arguments: Namespace, names: Sequence[str] = ("config_name", *FOLDERS)) -> list[str]:
    """The flags of these names as they are typed, those that were not given left out. Without names: all that lead
    another process to the same config files."""
    given = {_flag(name): getattr(arguments, name) for name in names}
    return [word for flag, value in given.items() if value for word in ([flag] if value is True else [flag, value])]


def shown(arguments: Namespace) -> list[str]:
    """The flags that ask for something to be shown; empty where something is to be trained."""
    return flags(arguments, (*SHOWING, "resolve", "package")) if flags(arguments, SHOWING) else []


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse_argument(message: str) -> NoReturn:
    """Refuse with a message of argparse, which may begin with `argument --dp: `."""
    flag, _, rule = message.removeprefix("argument ").partition(": ")
    _refuse(*((rule, flag) if message.startswith("argument ") else (message,)))


def _refuse(message: str, flag: str = "command line", remedy: str = "see --help", value: Any = NO_VALUE) -> NoReturn:
    raise UserError(Problem(flag, value, message, remedy))

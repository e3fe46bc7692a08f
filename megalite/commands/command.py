"""What all commands but training have in common: options, overrides, what is shown, and how a refusal ends them."""

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from megalite.commands.train import open_closed_streams
from megalite.config.arguments import Parser, number_from
from megalite.errors.problems import REFUSED, UserError, collect, refuse, to_stderr
from megalite.observe.readable import print_lines
from megalite.plan.picture import Picture, picture_problems, save_picture

ONE_OF = {"--world-size", "--dp"}  # options that exclude each other
Option = tuple[tuple[str, ...], dict[str, Any]]


class Shown(NamedTuple):
    """What a command answers: lines for stdout, which may be made while they are printed, its exit status, and the
    picture that --picture saves."""

    lines: Iterable[str] = ()
    status: int = 0
    draw: Callable[[], Picture] | None = None


Function = Callable[[argparse.Namespace, list[str]], Shown]


class Command(NamedTuple):
    """A function of its options and overrides, as a program. Its docstring, or that of its module, is the help."""

    function: Function
    options: tuple[Option, ...]
    takes_overrides: bool = True

    def parse(self, arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
        """The options, and the words that are none: overrides."""
        about = inspect.getdoc(self.function) or sys.modules[self.function.__module__].__doc__
        of_all = "OVERRIDES are those of pretrain_gpt.py (docs/configuration.md). " if self.takes_overrides else ""
        end = f"{of_all}Exit status 2: refused."
        kind = argparse.RawDescriptionHelpFormatter
        parser = Parser(description=about, epilog=end, formatter_class=kind, allow_abbrev=False)
        has_both = {names[0] for names, _ in self.options} >= ONE_OF
        one_of = parser.add_mutually_exclusive_group() if has_both else parser
        for names, settings in self.options:
            (one_of if names[0] in ONE_OF else parser).add_argument(*names, **settings)
        if not self.takes_overrides:
            return parser.parse_intermixed_args(arguments), []
        parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} [OVERRIDES ...]"
        return parser.parse_known_args(arguments)

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """The exit status. All that is wrong is printed as one refusal, and nothing else is."""
        open_closed_streams()
        name, problems = self.function.__name__, []
        try:
            options, overrides = self.parse(arguments)
            if picture := getattr(options, "picture", None):
                problems = picture_problems(picture, name)
            shown = collect(lambda: self.function(options, overrides), problems) or Shown()
            refuse(problems)
            if picture and shown.draw:
                save_picture(shown.draw, picture, name)
            lines = iter(shown.lines)
            first = [*islice(lines, 1)]  # a refusal comes before anything is printed
            print_lines(chain(first, lines))
        except UserError as error:
            to_stderr(str(error))
            return REFUSED
        except KeyboardInterrupt:
            return 130
        return shown.status


def command(*options: Option, overrides: bool = True) -> Callable[[Function], Command]:
    """Makes a function a command with these options, and with overrides or none."""
    return lambda function: Command(function, options, overrides)


def option(*names: str, **settings: Any) -> Option:
    """An option as `argparse` takes it."""
    return names, settings


COUNT: dict[str, Any] = {"type": number_from(1), "metavar": "N"}
RANKS: dict[str, Any] = {"type": number_from(1, 2**20), "metavar": "N"}
WORLD_SIZE = option("--world-size", **RANKS, help="ranks of your job; data parallelism is the rest")
PICTURE = option("--picture", type=Path, metavar="FILE", help="also draw it, to an .svg file")

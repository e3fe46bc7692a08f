"""What all commands but training have in common: options, overrides, what is shown, and how a refusal ends them."""

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megalite.errors.problems import REFUSED, UserError, collect, open_closed_streams, to_stderr
from megalite.observe.screens import print_lines
from megalite.plan.drawing import picture_problems, save_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SILENCE_S = 8.0  # the longest time without a word

Option = tuple[tuple[str, ...], dict[str, Any]]


class Shown(NamedTuple):
    """What a command answers: lines for stdout, its exit status, and the picture that --picture saves."""

    lines: Iterable[str] = ()
    status: int = 0
    draw: "Callable[[], Figure] | None" = None


class Command(NamedTuple):
    """A function of its options and overrides, as a program. The docstring of its module is its help."""

    function: Callable[[argparse.Namespace, list[str]], Shown]
    options: tuple[Option, ...]

    def parse(self, arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
        """The options, and the words that are none: overrides."""
        kind = argparse.RawDescriptionHelpFormatter
        about = sys.modules[self.function.__module__].__doc__
        parser = argparse.ArgumentParser(description=about, formatter_class=kind, allow_abbrev=False)
        for names, settings in self.options:
            parser.add_argument(*names, **settings)
        parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} [OVERRIDES ...]"
        return parser.parse_known_args(arguments)

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """The exit status. All that is wrong is printed as one refusal, and nothing else is."""
        open_closed_streams()
        options, overrides = self.parse(arguments)
        picture: Path | None = getattr(options, "picture", None)
        problems = picture_problems(picture, "--picture") if picture else []
        try:
            with _never_silent():
                shown = collect(lambda: self.function(options, overrides), problems)
                if shown is None or problems:
                    raise UserError(problems)
                if picture and shown.draw:
                    save_picture(shown.draw, picture, "--picture")
                lines = [*shown.lines]
        except UserError as error:
            to_stderr(str(error))
            return REFUSED
        except KeyboardInterrupt:
            return 130
        saved = ["", f"picture: {picture}"] if picture and not getattr(options, "json", False) else []
        print_lines([*lines, *saved])
        return shown.status


@contextmanager
def _never_silent() -> Iterator[None]:
    """A line on stderr now and then, until the command has something to show."""
    over, begin = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(SILENCE_S):
            with suppress(OSError):  # without Python's lock of stderr, which a process that is forked now would keep
                os.write(2, f"megalite: at work for {time.monotonic() - begin:.0f} s\n".encode())

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def command(*options: Option) -> Callable[[Callable[[argparse.Namespace, list[str]], Shown]], Command]:
    """Makes a function a command with these options."""
    return lambda function: Command(function, options)


def option(*names: str, **settings: Any) -> Option:
    """An option as `argparse` takes it."""
    return names, settings


def whole(text: str) -> int:
    """What an option counts, from 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def warn(warning: str) -> None:
    """A line on stderr about what is worth knowing."""
    to_stderr(f"megalite: {warning}")


COUNT: dict[str, Any] = {"type": whole, "metavar": "N"}
MODEL = option("model", type=Path, metavar="MODEL", help="a run folder, or a folder of a transformers model")
STEP = option("--step", type=int, metavar="N", help="of a run's checkpoint (default: the newest)")
WORLD_SIZE = option("--world-size", type=int, metavar="N", help="ranks of your job; data parallelism is the rest")
PICTURE = option("--picture", type=Path, metavar="FILE", help="also draw it, to a .png or .svg file")

"""Refusals, and how they, numbers and values are written for people.

Every check collects `Problem`s and raises one `UserError` with all of them. The launcher prints the error once, without
a traceback, and exits with status 2. Standard library only.
"""

import contextlib
import errno
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

LONGEST_SHOWN = 400
REFUSED = 2  # exit status of a refused configuration or input
# Control characters but newline and tab, marks of the writing direction, and halves of characters (bytes of a file name
# that are no UTF-8).
UNPRINTABLE = re.compile("[\0-\b\v-\f\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")
NO_VALUE = "\0"  # plain JSON, as problems travel between ranks; no command line can hold it
REMEDIES: dict[int | None, str] = {  # what mends a failure of the system, by its number
    errno.EMFILE: "raise the limit of open files (ulimit -n 65536) and start again",
    errno.ENOMEM: "free some memory and start again",
    errno.ENOSPC: "free some space or, where df -i shows none, some files of that disk",
    errno.EDQUOT: "delete some files of this user's, whose quota there is used up, or have it raised",
    errno.EIO: "the disk, or the network to it, fails (see dmesg): start again once it works",
    errno.ESTALE: "the network's disk was mounted anew: start again",
    errno.EROFS: "mount that disk for writing",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "allow this user to read and write there (see ls -l and lsattr)"),
}

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Problem:
    """One mistake: a dotted setting, file or environment variable, its value (or NO_VALUE), the rule that it breaks and
    what would work.

    `here`: a mistake in files or variables, which other ranks may not see. `alone`: rank 0 is out of reach, so that
    every rank must report the mistake.
    """

    setting: str
    value: Any
    rule: str
    hint: str = ""
    here: bool = False
    alone: bool = False

    def __str__(self) -> str:
        value = rounded(self.value) if isinstance(self.value, float) else self.value
        shown = "" if value == NO_VALUE else "=null" if value is None else f"={shortened(repr(value))}"
        hint = f"\n      fix: {self.hint}" if self.hint else ""
        return printable(f"{self.setting}{shown}: {self.rule}{hint}")

    def as_json(self) -> dict[str, Any]:
        """The fields, with a value that JSON can carry and that compares equal to its copy on other ranks."""
        value = self.value if isinstance(self.value, str | int | float | None) else str(self.value)
        return asdict(self) | {"value": value}


class UserError(Exception):
    """A configuration or an input that megalite refuses, with every problem that was found in it."""

    def __init__(self, problems: Sequence[Problem] | Problem) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        head = f"megalite: refused, {several(len(self.problems), 'problem')}:"
        super().__init__("\n".join([head, *(f"  {number}. {one}" for number, one in enumerate(self.problems, 1))]))

    def __reduce__(self) -> tuple[type["UserError"], tuple[list[Problem]]]:
        return type(self), (self.problems,)  # an exception pickles its args, here the rendered text, by default


class UnavailableError(UserError):
    """A file that the system does not give or take now, whatever the file holds: no reason to delete anything."""


def refuse(problems: Sequence[Problem]) -> None:
    """Raise a UserError if there are problems."""
    if problems:
        raise UserError(problems)


def collect(check: Callable[[], Result], problems: list[Problem]) -> Result | None:
    """The check's result, or None with its problems added to those of other checks."""
    try:
        return check()
    except UserError as error:
        problems += error.problems
        return None


def collect_all(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The results of all calls; UserError with the problems of all that failed."""
    problems: list[Problem] = []
    results = [collect(partial(function, item), problems) for item in items]
    refuse(problems)
    return results  # type: ignore[return-value]  # None only where there are problems


def about(setting: str, check: Callable[[], Result]) -> Result:
    """The check's result; what it finds wrong with data.path is wrong with `setting`, which names such paths, too."""
    try:
        return check()
    except UserError as error:
        named = [replace(one, setting=setting) if one.setting == "data.path" else one for one in error.problems]
        raise type(error)(named) from error


def shortened(text: str) -> str:
    """Text of a length that can be read."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def printable(text: str) -> str:
    """Text from outside (a file's name, a model's sample) with what could drive a terminal written out: \\x1b."""
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def to_stderr(text: str) -> None:
    """Print a message where a terminal is left; one that is gone ends no save."""
    with contextlib.suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr, flush=True)


def rounded(value: float) -> float:
    """The number without the digits that computing has blurred: 3e-05 for 2.9999999999999997e-05."""
    return float(f"{value:.12g}")


def plain(value: object) -> str:
    """A setting as one writes it: 3e-4, 0.1, [1,2], null."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(plain, value))}]"
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.11e}" if 0 < abs(value) < 0.001 or abs(value) >= 1e15 else f"{value:.12g}"
    return re.sub(r"\.?0*e(-?)\+?0*", r"e\1", text)


def several(number: float, what: str) -> str:
    """1 layer, 12 layers, 2 batches, 0.5 epochs."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:.3g}"
    return f"{text} {what}{'' if text == '1' else 'es' if what.endswith('tch') else 's'}"

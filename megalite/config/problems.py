"""What a user is told about a mistake: the setting, its value, the rule it breaks and what would work.

Every check in megalite collects `Problem`s and raises one `UserError` with all of them; the launcher prints the error
once, without a traceback, and exits with status 2. Imports nothing but the standard library.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

REFUSED = 2  # exit status of a refused configuration or input

Result = TypeVar("Result")


@dataclass(frozen=True)
class Problem:
    """One mistake. `setting` is a dotted name (`model.hidden_size`), a file or an environment variable.

    A `value` of `...` means that there is none to show. `here` marks what is wrong with files or variables here:
    other ranks may not see it. `alone` marks what no other rank can be relied on to say: rank 0 is out of reach.
    """

    setting: str
    value: Any
    rule: str
    remedy: str
    here: bool = False
    alone: bool = False

    def __str__(self) -> str:
        shown = "" if self.value is ... else "=null" if self.value is None else f"={self.value!r}"
        return f"{self.setting}{shown}: {self.rule}\n      fix: {self.remedy}"


class UserError(Exception):
    """A configuration or an input that megalite refuses, with every problem that was found in it."""

    def __init__(self, problems: Sequence[Problem] | Problem) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        assert self.problems, "a UserError without a problem helps nobody"
        super().__init__(self.render())

    def __reduce__(self) -> tuple[type["UserError"], tuple[list[Problem]]]:
        return UserError, (self.problems,)  # an exception pickles its args, here the rendered text, by default

    def render(self) -> str:
        """The whole message as the user reads it."""
        count = len(self.problems)
        head = f"megalite: refused, {count} problem{'s' if count > 1 else ''}:"
        return "\n".join([head, *(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))])


def collect(check: Callable[[], Result], problems: list[Problem]) -> Result | None:
    """The check's result, or None with its problems added to those of other checks."""
    try:
        return check()
    except UserError as error:
        problems += error.problems
        return None

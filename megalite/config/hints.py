"""Asks the rules, and finds values that would work instead.

What may work follows from a setting's type and from the other settings that the broken rule names: choices, the other
value of a switch, the default, numbers nearby, multiples and divisors of the numbers named. Every value is tried before
it is offered: with it the refused setting breaks no rule, and no setting is refused that was not refused before.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain, combinations, islice
from math import isqrt, prod
from typing import Any

from megalite.config.bounds import outside
from megalite.config.rule import Broken, Case, Rule, broken
from megalite.config.settings import SETTINGS, yaml_value
from megalite.errors.problems import Problem
from megalite.errors.words import rounded

TRIED, OFFERED = 80, 3  # values of one setting
NEAR = 32  # whole numbers that far away are tried
LARGEST_DIVISOR = 1 << 16  # of huge numbers, not all divisors are looked for


def problems_of(case: Case, rules: Sequence[Rule], refused: Set[str] = frozenset()) -> list[Problem]:
    """Everything that the rules find, each with what would work.

    A rule that speaks of a setting that is `refused` already stays silent: it would judge a value nobody asked for.
    """
    found = [*broken(case, rules)]
    hints = _Hints(case, rules, {one.names[0] for one in found})
    return [_problem(case, one, hints.hint(one)) for one in found if not one.speaks_of(refused)]


def _problem(case: Case, one: Broken, hint: str) -> Problem:
    name = one.names[0]
    given, value = case.given(name), case.value(name)
    derived = f"derived as {yaml_value(value)}, " if given is None and value is not None else ""
    return Problem(case.label(name), given, derived + one.rule, hint)


class _Hints:
    """Finds hints for one case; each change is tried once."""

    def __init__(self, case: Case, rules: Sequence[Rule], refused: Set[str]) -> None:
        self._case, self._rules, self._refused = case, rules, refused
        self._tried: dict[tuple[str, str], Set[str]] = {}

    def hint(self, one: Broken) -> str:
        """For each setting that the rule names, the nearest values that mend it."""
        left = self._refused - {one.names[0]}
        ways = [one.advice] if one.advice else []
        for name in one.names:
            asked = candidates(self._case, name, one)
            working = (value for value in islice(asked, TRIED) if self._refused_with(name, value) <= left)
            if offered := list(islice(working, OFFERED)):
                ways.append(_assignment(self._case, name, offered))
        return ", or ".join(ways) or f"other values of {' and '.join(map(self._case.label, one.names))}"

    def _refused_with(self, name: str, value: Any) -> Set[str]:
        """The settings that are refused with this change."""
        key = name, repr(value)
        if key not in self._tried:
            changed = self._case.changed(name, value)
            self._tried[key] = {one.names[0] for one in broken(changed, self._rules)}
        return self._tried[key]


def candidates(case: Case, name: str, broken_rule: Broken) -> Iterator[Any]:
    """Other values of a setting that the rule names, each once, the likeliest first."""
    given, seen, setting = case.given(name), list[Any](), SETTINGS.get(name)
    for value in _likely(case, name, broken_rule):
        value = rounded(value) if isinstance(value, float) else value
        usable = value is None or (value > 0 if setting is None else not outside(setting, value))
        if value != given and value not in seen and usable:
            seen.append(value)
            yield value


def _likely(case: Case, name: str, broken_rule: Broken) -> Iterator[Any]:
    value, setting = case.value(name), SETTINGS.get(name)
    others = [*(case.value(other) for other in broken_rule.names if other != name), *broken_rule.numbers]
    numbers = [one for one in others if isinstance(one, int | float) and not isinstance(one, bool)]
    if setting is None:  # a size that the command gives
        yield from _whole_numbers(value, numbers)
        return
    if isinstance(value, list) and setting.kind is not Any:
        yield list(dict.fromkeys(value))
        yield from (value[:at] + value[at + 1 :] for at in range(len(value)) if len(value) > 1)
    elif setting.choices:  # of auto nobody knows what it will be, unless it is what the refused setting can be
        yield from (one for one in setting.choices if one != "auto" or name == broken_rule.names[0])
    elif setting.kind is bool:
        yield not value
    elif setting.kind is int:
        yield from _whole_numbers(value, numbers)
    if setting.default != "auto":
        yield setting.default
    if setting.kind is float:
        yield from (float(one) for one in setting.limits.values())
        yield from (one * times for one in numbers for times in (1.0, 2.0, 0.5))
    if setting.nullable:
        yield None


def _whole_numbers(value: int | None, others: Iterable[float]) -> Iterator[int]:
    """Numbers nearby, and multiples and divisors of the others, the nearest first."""
    if value is None:
        return
    whole = [one for one in others if isinstance(one, int) and one > 1]
    found = {*range(value - NEAR, value + NEAR + 1)}
    for some in chain.from_iterable(combinations(whole, several) for several in range(1, len(whole) + 1)):
        times = value // prod(some)
        found |= {number * prod(some) for number in range(max(1, times - 1), times + OFFERED + 1)}
    for one in whole:
        small = [part for part in range(1, min(isqrt(one), LARGEST_DIVISOR) + 1) if one % part == 0]
        found |= {*small, *(one // part for part in small)}
    yield from sorted(found, key=lambda number: (abs(number - value), number))


def _assignment(case: Case, name: str, values: Sequence[Any]) -> str:
    """`parallel.pp=2 or 4 or null`"""
    numbers = [value for value in values if value is not None]
    shown = sorted(numbers) if all(isinstance(value, int) for value in numbers) else numbers
    return f"{case.label(name)}={' or '.join(map(yaml_value, [*shown, *[None] * (None in values)]))}"

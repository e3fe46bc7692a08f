"""The one engine of remedies: judges a config on a world by a list of rules, and finds what would work instead.

A rule is a function of a `Case` that yields a `Flaw` for each thing that is wrong. A flaw holds its remedy as a
formula: by setting, values that may mend it, the best first. Each value is tried before it is told: with it the refused
setting breaks no rule, and no setting is refused that was not refused before.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from megalite.config.bounds import outside
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, value_of, with_values, yaml_value
from megalite.errors.problems import Problem

TRIED, TRIED_IN_PAIRS = 60, 6  # values of one setting
OFFERED = 3

Changes = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One config on one world, of which any setting can be changed to see which rules it would break then.

    What the command that shows groups of ranks asks for beyond a config: `experts`, a mixture of experts even without
    parallel.ep and etp; `split_rank`, see `StageSettings`. `labels`: how the user knows the names that are no settings.
    """

    config: Config
    world_size: int
    experts: bool = False
    split_rank: int | None = None
    labels: Mapping[str, str] = field(default_factory=lambda: {"world_size": "world size"})

    def value(self, name: str) -> Any:
        return value_of(self.config, name) if name in SETTINGS else getattr(self, name)

    def changed(self, changes: Changes) -> "Case":
        settings = {name: value for name, value in changes.items() if name in SETTINGS}
        own = {name: value for name, value in changes.items() if name not in SETTINGS}
        return replace(self, config=with_values(self.config, settings), **own)

    def label(self, name: str) -> str:
        return self.labels.get(name, name)

    def show(self, *names: str) -> str:
        """`parallel.tp=2 x parallel.pp=4`"""
        return " x ".join(f"{self.label(name)}={yaml_value(self.value(name))}" for name in names)


@dataclass(frozen=True)
class Flaw:
    """A rule that a setting breaks. `fixes`: by setting, what to try; `words`: what would help and cannot be tried."""

    setting: str
    rule: str
    fixes: Mapping[str, Iterable[Any]] = field(default_factory=dict)
    words: str = ""

    def speaks_of(self, names: Set[str]) -> bool:
        """Whether one of the settings, or a group of them, is in the rule or in its remedy."""
        said = {self.setting, *re.findall(r"[a-z_]+\.[a-z_.]+[a-z_]|[a-z_]+(?==)", self.rule), *self.fixes}
        return not names.isdisjoint(said | {name.partition(".")[0] for name in said})


Rule = Callable[[Case], Iterator[Flaw]]


def problems_of(case: Case, rules: Sequence[Rule], refused: Set[str] = frozenset()) -> list[Problem]:
    """Everything that the rules find, each with what would work.

    A rule that speaks of a setting that is `refused` already stays silent: it would judge a value nobody asked for.
    """
    flaws = [flaw for rule in rules for flaw in rule(case)]
    return [
        Problem(case.label(flaw.setting), case.value(flaw.setting), flaw.rule, _remedy(case, rules, flaw, flaws))
        for flaw in flaws
        if not flaw.speaks_of(refused)
    ]


def _remedy(case: Case, rules: Sequence[Rule], flaw: Flaw, flaws: Sequence[Flaw]) -> str:
    """Single changes that mend everything, or else all that the setting may mend, or else this flaw; where there are
    none, the first pair of changes that does."""
    tried = {name: _distinct(islice(values, TRIED)) for name, values in flaw.fixes.items()}

    def works(changes: Changes, remaining: Set[str]) -> bool:
        return _allowed(changes) and not _flaws(case.changed(changes), rules, remaining)

    def mending(name: str, remaining: Set[str]) -> list[Any]:
        return list(islice((value for value in tried[name] if works({name: value}, remaining)), OFFERED))

    def pairs(remaining: Set[str]) -> Iterator[Changes]:
        for name, values in tried.items():
            for value in (each for each in values[:TRIED_IN_PAIRS] if _allowed({name: each})):
                [left] = _flaws(case.changed({name: value}), rules, remaining) or [flaw]
                for other, others in left.fixes.items():
                    more = ({name: value, other: each} for each in islice(others, TRIED_IN_PAIRS) if other != name)
                    yield from (pair for pair in more if works(pair, remaining))

    def beyond(name: str) -> Set[str]:
        return others - {each.setting for each in flaws if name in each.fixes}

    others = {each.setting for each in flaws} - {flaw.setting}
    found = {name: mending(name, frozenset()) or mending(name, beyond(name)) or mending(name, others) for name in tried}
    ways = [_told(case, name, values) for name, values in found.items() if values]
    if not ways and (pair := next(pairs(others), None)):
        ways = [" with ".join(_told(case, name, [value]) for name, value in pair.items())]
    ways += [flaw.words] * bool(flaw.words)
    return ", or ".join(ways) or f"other values of {' and '.join(map(case.label, flaw.fixes))}"


def _flaws(case: Case, rules: Sequence[Rule], remaining: Set[str]) -> list[Flaw]:
    """The first flaw besides those of the settings in `remaining`; empty where there is none."""
    return list(islice((flaw for rule in rules for flaw in rule(case) if flaw.setting not in remaining), 1))


def _distinct(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    found.extend(value for value in values if value not in found)
    return found


def _allowed(changes: Changes) -> bool:
    """Whether each setting may have its value, whatever the others are."""
    return all(
        value is None or name not in SETTINGS or outside(SETTINGS[name], value) is None
        for name, value in changes.items()
    )


def _told(case: Case, name: str, values: list[Any]) -> str:
    """`parallel.pp=2 or 4`, `leave parallel.pipeline_layout unset`."""
    default = SETTINGS[name].default if name in SETTINGS else None
    unset = [value for value in values if value == default and (value is None or value is False)]
    others = [value for value in values if value not in unset]
    if all(isinstance(value, int) for value in others):
        others.sort()
    label = case.label(name)
    told = [f"{label}={' or '.join(_quoted(name, value) for value in others)}"] * bool(others)
    return ", or ".join(told + [f"leave {label} unset"] * bool(unset))


def _quoted(name: str, value: Any) -> str:
    """A layout of stages as it is pasted into a shell: its quotes are for the shell, and Hydra needs some, too."""
    return f"'\"{value}\"'" if name == "parallel.pipeline_layout" else yaml_value(value)

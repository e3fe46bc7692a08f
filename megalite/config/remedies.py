"""Runs the rules over a config and a world size, and finds values that would work instead.

A rule is a function of a `Case` that yields a `Flaw` for each thing that is wrong. A flaw holds its remedy as a
formula: by setting, values that may mend it, the best first. Each value is tried before it is told: with it the refused
setting breaks no rule, and no setting is refused that was not refused before.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, cast

from megalite.config.bounds import outside
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, value_of, with_values, yaml_value
from megalite.errors.problems import Problem
from megalite.errors.remedies import divisors, multiples
from megalite.errors.words import rounded

TRIED, OFFERED = 60, 3  # values of one setting


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

    def changed(self, name: str, value: Any) -> "Case":
        change = {"config": with_values(self.config, {name: value})} if name in SETTINGS else {name: value}
        return replace(self, **change)

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


def splits(
    case: Case,
    name: str,
    over: str,
    *,
    derived: int | None = None,
    where: str = "",
    fixes: Mapping[str, Iterable[Any]] | None = None,
    words: str = "",
) -> Iterator[Flaw]:
    """Setting `name`, or what is derived for it where it is not set, is a multiple of setting `over`."""
    size, parts = cast(int, case.value(name) or derived), cast(int, case.value(over))
    if size % parts:
        rule = f"{'' if case.value(name) else f'derived as {size}, '}does not split over {case.show(over)}{where}"
        fixes = {over: divisors(size, parts), name: multiples(parts, size), **(fixes or {})}
        yield Flaw(name, rule, fixes, words)


def problems_of(case: Case, rules: Sequence[Rule], refused: Set[str] = frozenset()) -> list[Problem]:
    """Everything that the rules find, each with what would work.

    A rule that speaks of a setting that is `refused` already stays silent: it would judge a value nobody asked for.
    """
    flaws = [flaw for rule in rules for flaw in rule(case)]
    others = {flaw.setting for flaw in flaws}
    return [
        Problem(case.label(one.setting), case.value(one.setting), one.rule, _remedy(case, rules, one, others))
        for one in flaws
        if not one.speaks_of(refused)
    ]


def _remedy(case: Case, rules: Sequence[Rule], flaw: Flaw, refused: Set[str]) -> str:
    """Of each setting the values that mend the flaw; of these, the ones that leave the fewest settings refused."""
    ways, halfway = [], dict[int, str]()
    for name, values in flaw.fixes.items():
        working: dict[int, list[Any]] = {}  # by how many settings stay refused
        for value in islice(values, TRIED):
            value = rounded(value) if isinstance(value, float) else value
            if value is not None and name in SETTINGS and outside(SETTINGS[name], value):
                continue
            changed = case.changed(name, value)
            left = {other.setting for rule in rules for other in rule(changed)}
            if left <= refused - {flaw.setting}:
                working.setdefault(len(left), []).append(value)
            elif flaw.setting not in left:
                text = f"{_told(case, name, [value])} and another {' and '.join(sorted(left - refused))}"
                halfway.setdefault(len(left - refused), text)
        if working:
            ways.append(_told(case, name, working[min(working)]))
    ways += [flaw.words] * bool(flaw.words)
    if halfway and not ways:
        return halfway[min(halfway)]
    return ", or ".join(ways) or f"other values of {' and '.join(map(case.label, flaw.fixes))}"


def _told(case: Case, name: str, values: list[Any]) -> str:
    """The first few: `parallel.pp=2 or 4 or null`. To leave a setting out would not help where a folder gives it."""
    offered = [value for at, value in enumerate(values) if value not in values[:at]][:OFFERED]
    label, shown = case.label(name), [value for value in offered if value is not None]
    if all(isinstance(value, int) for value in shown):
        shown.sort()
    shown += [None] * (None in offered and name in SETTINGS)
    # A layout of stages as it is pasted into a shell: its quotes are for the shell, and Hydra needs some, too.
    words = [f"'\"{one}\"'" if one and name == "parallel.pipeline_layout" else yaml_value(one) for one in shown]
    return f"{label}={' or '.join(words)}" if words else f"leave {label} out"

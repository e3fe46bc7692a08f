"""The one engine of remedies: what to change where settings, taken together, break a rule.

A rule is a function that yields the `Flaw`s of a case. `candidates.py` holds the values worth trying for a setting.
Each value is tried before it is told: with it the flaw is gone, and no rule is broken that was not broken before.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from megalite.config.candidates import candidates, unset
from megalite.config.case import Case, default_of
from megalite.config.parallel_rules import layout_of_case, world_splits_into_the_layout
from megalite.config.schema import Config
from megalite.config.settings import yaml_value
from megalite.errors.problems import Problem, UserError
from megalite.layout.flaws import Flaw
from megalite.layout.layout_rules import layout_of
from megalite.layout.ranks import ParallelLayout

TRIED = 160  # candidates of one setting, at most
OFFERED = {
    "parallel.order": 1,
    "parallel.pipeline_layout": 2,
    "parallel.schedule": 4,
    "world_size": 2,
    **dict.fromkeys(("model.num_layers", "model.num_attention_heads", "model.ffn_hidden_size"), 2),
    **dict.fromkeys(("train.global_batch_size", "train.seq_length", "train.batch_ramp", "model.vocab_multiple"), 2),
}
# How many values of the first, second and third setting are tried where one change is not enough.
BREADTHS = ((8, 8), (8, 2, 2))
MOST_TRIED = 1000  # changes of several settings: a refusal comes at once


Rule = Callable[[Case], Iterator[Flaw]]
Changes = dict[str, Any]


def problems_of(case: Case, rules: Sequence[Rule], also: Sequence[Rule] = ()) -> list[Problem]:
    """Everything that the rules find, each with what would work. What is advised breaks no rule of `also` either."""
    search = _Search(case, (*rules, *also))
    told = _flaws_of(case, rules)
    return [Problem(case.label(one.field), case.value(one.field), one.rule, search.remedy(one)) for one in told]


def parallel_layout(config: Config, world_size: int) -> ParallelLayout:
    """The layout that the config asks for, or a UserError with everything that is wrong with it."""
    case = Case(config, world_size)
    if problems := problems_of(case, (world_splits_into_the_layout,)):
        raise UserError(problems)
    return layout_of(layout_of_case(case))


def _flaws_of(case: Case, rules: Sequence[Rule]) -> list[Flaw]:
    """Flaws of one kind about one setting are one."""
    found: dict[tuple[str, str], Flaw] = {}
    for rule in rules:
        for flaw in rule(case):
            found.setdefault(flaw.key, flaw)
    return list(found.values())


class _Search:
    """Tries changes of a case."""

    def __init__(self, case: Case, rules: Sequence[Rule]) -> None:
        self.case, self.rules = case, rules
        self.strictest_first = list(rules)
        self.tried: dict[str, list[Flaw]] = {}
        self.before = self.flaws({})
        self.most = 0  # changes that may have been tried before a search is given up

    def flaws(self, changes: Changes) -> list[Flaw]:
        key = repr(sorted(changes.items()))
        if key not in self.tried:
            self.tried[key] = _flaws_of(self.case.changed(changes), self.rules)
        return self.tried[key]

    def leaves_only(self, allowed: set[Any], changes: Changes) -> bool:
        """Whether the changes leave no other flaws than these. The rule that says no is asked first the next time."""
        case = self.case.changed(changes)
        for place, rule in enumerate(self.strictest_first):
            if any(flaw.key not in allowed for flaw in rule(case)):
                self.strictest_first.insert(0, self.strictest_first.pop(place))
                return False
        return True

    def remedy(self, flaw: Flaw) -> str:
        """Single changes; where only another world would help, or nothing, several together as well."""
        found = {}
        for name in flaw.fixes:
            found[name] = self.values(name, set()) or self.values(name, self.others(flaw, name))
        ways = [self.told(name, values) for name, values in found.items() if values]
        if not any(values for name, values in found.items() if name != "world_size"):
            ways += self.together(flaw)
        for adding in (False, True):  # others hide what else would be wrong, or make up for it
            if not ways:
                found = {name: self.mending(name, flaw, adding=adding) for name in flaw.fixes}
                ways = [self.told(name, values) for name, values in found.items() if values]
        return ", or ".join(ways) or f"other values of {' and '.join(map(self.case.label, flaw.fixes))}"

    def others(self, flaw: Flaw, name: str) -> set[Any]:
        """What may stay broken when the setting is changed: it mends all flaws of the kind that may be mended by it."""
        mended = {one.key for one in self.before if one.kind == flaw.kind and name in one.fixes}
        return {one.key for one in self.before} - mended - {flaw.key}

    def values(self, name: str, allowed: set[Any]) -> list[Any]:
        """The nearest few values that leave only the allowed flaws."""
        return self.nearest(name, lambda value: self.leaves_only(allowed, {name: value}))

    def mending(self, name: str, flaw: Flaw, *, adding: bool) -> list[Any]:
        """The nearest few values with which the flaw is gone, and none is new unless `adding`."""
        before = {one.key for one in self.before}

        def works(value: Any) -> bool:
            after = {one.key for one in self.flaws({name: value})}
            return flaw.key not in after and (adding or after <= before)

        return self.nearest(name, works)

    def nearest(self, name: str, works: Callable[[Any], bool]) -> list[Any]:
        tried = (value for value in islice(candidates(self.case, name), TRIED) if self.case.allows(name, value))
        return list(islice(filter(works, tried), OFFERED.get(name, 3)))

    def together(self, flaw: Flaw) -> list[str]:
        """The nearest changes of several settings that do together what one does not."""
        for breadths in BREADTHS:
            for name in flaw.fixes:
                self.most = len(self.tried) + MOST_TRIED // len(flaw.fixes)
                ways = list(self.extended({}, (name,), self.others(flaw, name), breadths))
                if ways:
                    _, changes = min(ways, key=lambda way: way[0])
                    told = " with ".join(self.told(changed, [value]) for changed, value in changes.items())
                    return [told.replace(" with leave ", ", and leave ")]
        return []

    def extended(
        self, changes: Changes, names: Sequence[str], allowed: set[Any], breadths: Sequence[int]
    ) -> Iterator[tuple[int, Changes]]:
        """Changes with one more for each of `breadths`, and how far the values are from those given, in candidates."""
        for name in names:
            if name in changes or name == "world_size":
                continue
            case = self.case.changed(changes)
            for distance, value in enumerate([*islice(candidates(case, name), breadths[0]), *unset(case, name)]):
                if not case.allows(name, value):
                    continue
                more = {**changes, name: value}
                if len(self.tried) > self.most:
                    return
                rest = [one for one in self.flaws(more) if one.key not in allowed]
                if not rest:
                    yield distance, more
                elif breadths[1:]:
                    deeper = self.extended(more, rest[0].fixes, allowed, breadths[1:])
                    yield from ((distance + further, way) for further, way in deeper)

    def told(self, name: str, values: list[Any]) -> str:
        """`parallel.pp=2 or 4`, `leave parallel.pipeline_layout unset`."""
        default = default_of(name)
        unset = [value for value in values if value == default and (value is None or value is False)]
        set_ = [value for value in values if value not in unset]
        if all(isinstance(value, int) for value in set_):
            set_.sort()
        shown = " or ".join(_quoted(name, value) for value in set_)
        label = self.case.label(name)
        return ", or ".join([f"{label}={shown}"] * bool(set_) + [f"leave {label} unset"] * bool(unset))


def _quoted(name: str, value: Any) -> str:
    """A layout of stages as it is pasted into a shell: its quotes are for the shell, and Hydra needs some, too."""
    return f"'\"{value}\"'" if name == "parallel.pipeline_layout" else yaml_value(value)

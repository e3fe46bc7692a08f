"""What a rule is, and which values would keep a broken one.

A row says how the value of a setting must not be to those of others (to their product). A generator says whether
something is wrong, the settings that it is about, and a sentence in which `{1}` is the second of them with its value:

    ("num_attention_heads", "not a multiple of", "tp")
    yield moe.top_k > moe.num_experts, "top_k num_experts", "there are only {1}"

The first setting is refused. A setting is named by its last words where no other ends on them. A value is offered only
after it was tried: with it the refused setting breaks no rule, and no setting is refused that was not refused before.
"""

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from megalite.config.clashes import full_name
from megalite.config.derive import derive_sizes
from megalite.config.groups import flaws_of_groups
from megalite.config.lr_table import flaws_of_table
from megalite.config.schema import HELD_OUT, Config
from megalite.config.settings import SETTINGS, Setting, value_of, with_values, yaml_value
from megalite.errors.problems import Problem, rounded

RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "not a multiple of": operator.mod,
    "does not divide": lambda one, other: other % one,
    "above": operator.gt,
    "not above": operator.le,
    "below": operator.lt,
}
WITHIN = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
LARGEST, LARGEST_IN_LIST = 2**31 - 1, 2**63 - 1  # of whole numbers without a limit of their own
PLACES = (
    *("run_dir", "tokenizer", "data.path", "data.cache_dir", "checkpoint.init_from", "parallel.nccl_options"),
    *("launch.status_file", "checkpoint.branch_from"),
)
LONGEST_NAME = 255  # bytes of a file's name, in any usual file system
TRIED, OFFERED, WAYS = 80, 3, 4  # values of one setting, those of them that are offered, and settings
SET_NAME = re.compile(r"[A-Za-z_]\w{0,39}", re.ASCII)
NEAR = 32  # whole numbers that far away are tried
LARGEST_DIVISOR = 1 << 12


def flaws_of_sets(sets: Mapping[Any, Any]) -> list[str]:
    """All that is wrong with data.validation on its own."""
    found = [f"{name!r} must be a name: letters, digits and _" for name in sets if not SET_NAME.fullmatch(str(name))]
    found += [f"{HELD_OUT} names the part that data.validation_fraction holds out"] * (HELD_OUT in sets)
    for name, paths in sets.items():
        listed = paths if isinstance(paths, list) else [paths]
        if not listed or not all(isinstance(path, str) and path.strip() for path in listed):
            found.append(f"{name} must be a path or a list of paths")
        elif problem := unusable_path("data.validation", listed):
            found.append(f"{name}: {problem.rule}")
    return found


# What is wrong with values of these settings, in words, and one that works.
SHAPES: dict[str, tuple[Callable[[Any], list[str]], str]] = {
    "lr.table": (flaws_of_table, "[[0,0.1],[0.05,1],[1,0]]"),
    "data.validation": (flaws_of_sets, "{web: web.txt, code: [a.txt, b.txt]}"),
    "optimizer.groups": (flaws_of_groups, "[{match: '*.attention.*', lr: 0.1x, weight_decay: 0}]"),
}
EXAMPLES = {  # where the default is null, and null is no answer to who gives a number
    "train.steps": "200",
    "train.tokens": "20B",
    "train.tokens_per_parameter": "20",
    "train.flops": "1e19",
    "train.epochs": "2",
}

Row = tuple[Any, ...]  # setting, relation, others; and, if need be, in which cases
Found = tuple[Any, str, str]  # whether it is wrong, words, sentence
Rule = Row | Callable[["Case"], Iterable[Found]]


@dataclass(frozen=True)
class Case:
    """One config on one world, of which any setting can be changed to see which rules it would break then.

    `split_rank`: see `StageSettings`. `labels`: how the user knows the sizes that are no settings.
    """

    config: Config
    world_size: int
    split_rank: int | None = None
    labels: Mapping[str, str] = field(default_factory=lambda: {"world_size": "world size"})

    def given(self, name: str) -> Any:
        return value_of(self.config, name) if name in SETTINGS else getattr(self, name)

    def value(self, name: str) -> Any:
        """The value that is given, or for null the one that is derived from model and layout."""
        given = self.given(name)
        return value_of(self.derived, name) if given is None and name in SETTINGS else given

    def changed(self, name: str, value: Any) -> "Case":
        change = {"config": with_values(self.config, {name: value})} if name in SETTINGS else {name: value}
        return replace(self, **change)

    def label(self, name: str) -> str:
        return self.labels.get(name, name)

    def show(self, name: str) -> str:
        """`parallel.tp=2`"""
        return f"{self.label(name)}={yaml_value(self.value(name))}"

    @cached_property
    def derived(self) -> Config:
        """The config with what model and layout derive filled in."""
        return derive_sizes(self.config)


def example(setting: Setting) -> str:
    """An override of the setting that works, whatever is wrong with a value."""
    works = SHAPES[setting.name][1] if setting.name in SHAPES else EXAMPLES.get(setting.name)
    return f"{setting.name}={works}" if works else setting.as_default


def outside(setting: Setting, value: Any) -> Problem | None:
    """The problem with a value of the right type, and not null, that the setting does not allow."""
    if setting.name in SHAPES:
        wrong = SHAPES[setting.name][0](value)
        return Problem(setting.name, value, "; ".join(wrong), example(setting)) if wrong else None
    parts, limits = value if isinstance(value, list) else [value], setting.limits
    most = limits.get("at_most", LARGEST_IN_LIST if isinstance(value, list) else LARGEST)
    if setting.choices and not {*parts} <= {*setting.choices}:
        return Problem(setting.name, value, "unknown choice", f"choices: {', '.join(setting.choices)}")
    if any(isinstance(one, float) and not math.isfinite(one) for one in parts):
        rule = "must be finite"
    elif not all(WITHIN[name](one, limit) for name, limit in limits.items() for one in parts):
        rule = f"must be {setting.limit_words}"
    elif any(isinstance(one, int) and one > most for one in parts):
        rule = f"is more than {most:,}"
    else:
        return unusable_path(setting.name, value) if setting.name in PLACES else None
    return Problem(setting.name, value, rule, example(setting))


def unusable_path(name: str, value: Any) -> Problem | None:
    """The problem with a path, or with one of several, that no file system takes; `name` is the setting."""
    for path in map(os.path.expanduser, map(str, value if isinstance(value, list) else [value])):
        empty = not path and name != "tokenizer"  # its rule names the choices
        too_long = any(len(os.fsencode(part)) > LONGEST_NAME for part in path.split("/"))
        if empty or too_long or "\0" in path or path.startswith("~"):  # of a user who is unknown
            return Problem(name, value, "no file can have this name", "another path; ./~NAME for such a name")
    return None


def broken(case: Case, rules: Iterable[Rule]) -> Iterator[tuple[list[str], str]]:
    """What the rules find: full names of settings, numbers among them, and the sentence."""
    for rule in rules:
        for wrong, words, sentence in [_related(case, *rule)] if isinstance(rule, tuple) else rule(case):
            if wrong:
                names = [full_name(word) for word in words.split()]
                for at, name in enumerate(names):
                    if (hole := f"{{{at}}}") in sentence:
                        sentence = sentence.replace(hole, case.show(name))
                yield names, sentence


def routes(case: Case) -> bool:
    """Whether the model is a mixture of experts."""
    return case.config.model.moe.num_experts > 0


def _related(case: Case, name: str, relation: str, others: str, when: Callable[[Case], Any] = bool) -> Found:
    values = [case.value(full_name(word)) for word in (name, *others.split())]
    wrong = None not in values and when(case) and RELATIONS[relation](values[0], math.prod(values[1:]))
    return wrong, f"{name} {others}", f"{relation} {' x '.join(f'{{{at}}}' for at in range(1, len(values)))}"


def speaks_of(names: Iterable[str], refused: Set[str]) -> bool:
    """Whether one of the settings, or its group, is refused already: a rule would judge a value nobody asked for."""
    return any(name in refused or name.partition(".")[0] in refused for name in names)


def problems_of(case: Case, rules: Sequence[Rule], refused: Set[str] = frozenset()) -> list[Problem]:
    """Everything that the rules find and that does not speak of what is `refused`, each with what would work."""
    found = [*broken(case, rules)]
    wrong, tried = {names[0] for names, _ in found}, dict[tuple[str, str, str], bool]()

    def mends(name: str, value: Any, refused: str) -> bool:
        if (key := (name, repr(value), refused)) not in tried:
            tried[key] = all(at[0] in wrong - {refused} for at, _ in broken(case.changed(name, value), rules))
        return tried[key]

    def problem(names: list[str], rule: str) -> Problem:
        refused, ways = names[0], list[str]()
        given, value = case.given(refused), case.value(refused)
        changeable = [name for name in names if not name.isdigit()]
        for name in changeable:
            works = [*islice((one for one in candidates(case, name, names) if mends(name, one, refused)), OFFERED)]
            if all(isinstance(one, int | None) for one in works):
                works.sort(key=lambda one: (one is None, one))
            ways += [f"{case.label(name)}={' or '.join(map(yaml_value, works))}"] if works else []
        hint = ", or ".join(ways[:WAYS]) or f"other values of {' and '.join(map(case.label, changeable))}"
        derived = f"derived as {yaml_value(value)}, " if given is None and value is not None else ""
        return Problem(case.label(refused), given, derived + rule, hint)

    return [problem(names, rule) for names, rule in found if not speaks_of(names, refused)]


def candidates(case: Case, name: str, names: Sequence[str]) -> Iterator[Any]:
    """Other values of a setting that a rule about `names` may allow, each once, the likeliest first. They follow from
    its type, and from the values of the other settings and the numbers among the names."""
    setting, value, seen = SETTINGS.get(name), case.value(name), [case.given(name)]
    others = [int(other) if other.isdigit() else case.value(other) for other in names if other != name]
    numbers = [one for one in others if isinstance(one, int | float) and not isinstance(one, bool)]
    counted = (setting is None or setting.kind is int) and value is not None
    likely = _whole_numbers(value, [one for one in numbers if isinstance(one, int) and one > 1]) if counted else []
    likely += _of_its_kind(setting, value, numbers, refused=name == names[0]) if setting else []
    for one in likely[:TRIED]:
        one = rounded(one) if isinstance(one, float) else one
        if one not in seen and (one is None or (one > 0 if setting is None else not outside(setting, one))):
            seen.append(one)
            yield one


def _of_its_kind(setting: Setting, value: Any, numbers: Sequence[float], *, refused: bool) -> list[Any]:
    """Lists without one of their parts, choices, the other value of a switch, limits; default and null."""
    found = list[Any]()
    if isinstance(value, list) and setting.kind is not Any:
        shorter = [value[:at] + value[at + 1 :] for at in range(len(value)) if len(value) > 1]
        found = [[one for at, one in enumerate(value) if one not in value[:at]], *shorter]
    elif setting.kind is Any and value is None:
        found = ["FOLDER"]
    elif setting.choices:  # nobody knows what auto will be, unless the refused setting can be it
        found = [one for one in setting.choices if one != "auto" or refused]
    elif setting.kind is bool:
        found = [not value]
    elif setting.kind is float:
        found = [*map(float, setting.limits.values()), *(one * by for one in numbers for by in (1.0, 2.0, 0.5))]
    return [*found, *([setting.default] if setting.default != "auto" else []), *([None] if setting.nullable else [])]


def _whole_numbers(value: int, others: Sequence[int]) -> list[Any]:
    """Numbers nearby, and multiples and divisors of the others and of their product, the nearest first."""
    found = {*range(value - NEAR, value + NEAR + 1)}
    for one in {*others, math.prod(others)}:
        first = max(1, value // one - 1)
        found |= {times * one for times in range(first, first + OFFERED + 2)}
        found |= {part for part in range(1, min(one, LARGEST_DIVISOR) + 1) if one % part == 0}
    return sorted(found, key=lambda number: (abs(number - value), number))

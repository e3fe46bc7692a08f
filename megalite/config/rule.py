"""What a rule is, and which values would keep a broken one.

Most rules are rows: a setting, how its value and that of others (their product) must not be, the others.

    ("num_attention_heads", "not a multiple of", "tp")

Where that is not enough, a generator says whether something is wrong, the settings that it is about, and what a user
reads of it; `{1}` stands for the second of them with its value (`model.moe.num_experts=8`):

    yield moe.top_k > moe.num_experts, "top_k num_experts", "there are only {1}"

The first setting is refused. A setting is named by its last words where no other ends on them. What may work instead
follows from its type and from the others: choices, the other value of a switch, the default, numbers nearby, multiples
and divisors of the others and of numbers among the words. Every value is tried before it is offered: with it the
refused setting breaks no rule, and no setting is refused that was not refused before.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import islice
from math import isqrt, prod
from typing import Any

from megalite.config.derive import derive_compile, derive_model, derive_schedule
from megalite.config.layout import axis_sizes, dense_ranks, expert_ranks, has_experts
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, Setting, outside, value_of, with_values, yaml_value
from megalite.errors.problems import Problem
from megalite.errors.words import rounded

RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "not a multiple of": operator.mod,
    "does not divide": lambda one, other: other % one,
    "above": operator.gt,
    "below": operator.lt,
}
TRIED, OFFERED, WAYS = 80, 3, 4  # values of one setting, those of them that are offered, and settings
NEAR = 32  # whole numbers that far away are tried
LARGEST_DIVISOR = 1 << 16  # of huge numbers, not all divisors are looked for

Row = tuple[Any, ...]  # setting, relation, others; and, if need be, in which cases
Found = tuple[Any, str, str]  # whether it is wrong, words, sentence
Rule = Row | Callable[["Case"], Iterable[Found]]


@dataclass(frozen=True)
class Case:
    """One config on one world, of which any setting can be changed to see which rules it would break then.

    The command that shows groups of ranks asks for more than a config says: `experts`, a mixture of experts even
    without parallel.ep and etp; `split_rank`, see `StageSettings`. `labels`: how the user knows names of no setting.
    """

    config: Config
    world_size: int
    experts: bool = False
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
        axes, config, given = self.config.parallel, self.config, self.given("parallel.sequence_parallel")
        sequence_parallel, schedule = axes.tp > 1 if given is None else given, derive_schedule(axes)
        layout = replace(axes, etp=axes.etp or axes.tp, sequence_parallel=sequence_parallel, schedule=schedule)
        model = derive_model(config.model, config.train.seq_length)
        return with_values(replace(config, model=model, parallel=layout), {"train.compile": derive_compile(config)})

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each axis; dp and edp are rounded down where the layout does not fill the world."""
        return axis_sizes(self.config, self.world_size, experts=self.experts)

    @property
    def has_experts(self) -> bool:
        return has_experts(self.config, experts=self.experts)

    @property
    def fills_the_world(self) -> bool:
        return self.world_size % dense_ranks(self.config) == 0

    @property
    def experts_fill_the_world(self) -> bool:
        return self.world_size % expert_ranks(self.config) == 0

    @property
    def batch_unit(self) -> int:
        """Sequences of a micro-batch for each data-parallel rank, of which batches are multiples."""
        return (self.config.train.micro_batch_size or 1) * max(1, self.sizes["dp"])


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


def _related(case: Case, name: str, relation: str, others: str, when: Callable[[Case], Any] = bool) -> Found:
    values = [case.value(full_name(word)) for word in (name, *others.split())]
    wrong = None not in values and when(case) and RELATIONS[relation](values[0], prod(values[1:]))
    return wrong, f"{name} {others}", f"{relation} {' x '.join(f'{{{at}}}' for at in range(1, len(values)))}"


@cache
def full_name(word: str) -> str:
    """The setting that ends on these words, or the name of no setting as it is."""
    found = [name for name in SETTINGS if name == word or (word not in SETTINGS and name.endswith(f".{word}"))]
    assert len(found) < 2, f"{word} can be any of {found}"
    return found[0] if found else word


def speaks_of(names: Iterable[str], refused: Set[str]) -> bool:
    """Whether one of the settings, or its group, is refused already: a rule would judge a value nobody asked for."""
    return any(name in refused or name.partition(".")[0] in refused for name in names)


def problems_of(case: Case, rules: Sequence[Rule], refused: Set[str] = frozenset()) -> list[Problem]:
    """Everything that the rules find and that does not speak of what is `refused`, each with what would work."""
    found = [*broken(case, rules)]
    wrong, tried = {names[0] for names, _ in found}, dict[tuple[str, str], Set[str]]()

    def breaks(name: str, value: Any) -> Set[str]:
        if (key := (name, repr(value))) not in tried:
            tried[key] = {names[0] for names, _ in broken(case.changed(name, value), rules)}
        return tried[key]

    def offered(name: str, names: list[str]) -> list[Any]:
        mending = (one for one in candidates(case, name, names) if breaks(name, one) <= wrong - {names[0]})
        return [*islice(mending, OFFERED)]

    def problem(names: list[str], rule: str) -> Problem:
        given, value = case.given(names[0]), case.value(names[0])
        derived = f"derived as {yaml_value(value)}, " if given is None and value is not None else ""
        changeable = [name for name in names if not name.isdigit()]
        ways = [f"{case.label(name)}={choice}" for name in changeable if (choice := _choice(offered(name, names)))]
        hint = ", or ".join(ways[:WAYS]) or f"other values of {' and '.join(map(case.label, changeable))}"
        return Problem(case.label(names[0]), given, derived + rule, hint)

    return [problem(names, rule) for names, rule in found if not speaks_of(names, refused)]


def candidates(case: Case, name: str, names: Sequence[str]) -> Iterator[Any]:
    """Other values of a setting that a rule about `names` may allow, each once, the likeliest first."""
    setting, seen = SETTINGS.get(name), [case.given(name)]
    others = [int(other) if other.isdigit() else case.value(other) for other in names if other != name]
    numbers = [one for one in others if isinstance(one, int | float) and not isinstance(one, bool)]
    for value in islice(_likely(setting, case.value(name), numbers, refused=name == names[0]), TRIED):
        value = rounded(value) if isinstance(value, float) else value
        if value not in seen and (value is None or (value > 0 if setting is None else not outside(setting, value))):
            seen.append(value)
            yield value


def _likely(setting: Setting | None, value: Any, others: Sequence[float], *, refused: bool) -> Iterator[Any]:
    if (setting is None or setting.kind is int) and value is not None:
        yield from _whole_numbers(value, [one for one in others if isinstance(one, int) and one > 1])
    if setting is None:  # a size that the command gives
        return
    if isinstance(value, list) and setting.kind is not Any:
        yield list(dict.fromkeys(value))
        yield from (value[:at] + value[at + 1 :] for at in range(len(value)) if len(value) > 1)
    elif setting.kind is Any and value is None:
        yield "FOLDER"
    elif setting.choices:  # of auto nobody knows what it will be, unless it is what the refused setting can be
        yield from (one for one in setting.choices if one != "auto" or refused)
    elif setting.kind is bool:
        yield not value
    elif setting.kind is float:
        yield from (float(one) for one in setting.limits.values())
        yield from (one * times for one in others for times in (1.0, 2.0, 0.5))
    yield from [setting.default] if setting.default != "auto" else []
    yield from [None] if setting.nullable else []


def _whole_numbers(value: int, others: Sequence[int]) -> list[int]:
    """Numbers nearby, and multiples and divisors of the others and of their product, the nearest first."""
    found = {*range(value - NEAR, value + NEAR + 1)}
    for one in {*others, prod(others)}:
        first = max(1, value // one - 1)
        found |= {times * one for times in range(first, first + OFFERED + 2)}
        small = [part for part in range(1, min(isqrt(one), LARGEST_DIVISOR) + 1) if one % part == 0]
        found |= {*small, *(one // part for part in small)}
    return sorted(found, key=lambda number: (abs(number - value), number))


def _choice(values: Sequence[Any]) -> str:
    """`2 or 4 or null`"""
    whole = all(isinstance(value, int | None) for value in values)
    return " or ".join(map(yaml_value, sorted(values, key=lambda one: (one is None, one or 0)) if whole else values))

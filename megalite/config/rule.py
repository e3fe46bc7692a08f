"""What a rule is: a generator of rows (what is wrong, the settings that it is about, what a user reads of it).

    yield moe.top_k > moe.num_experts, "top_k num_experts", "there are only {1}"

The first setting is refused where the first entry is true. A setting is named by its last words where no other ends on
them; `{1}` stands for the second one with its value (`model.moe.num_experts=8`). `hints.py` tries other values of all
settings named. A number among them is one of which values may be multiples or divisors. A fourth entry is advice.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from megalite.config.derive import derive_compile, derive_model, derive_schedule
from megalite.config.layout import axis_sizes, dense_ranks
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, value_of, with_values, yaml_value

Row = tuple[Any, str, str] | tuple[Any, str, str, str]


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

    def show(self, *names: str) -> str:
        """`parallel.tp=2 x parallel.pp=4`"""
        return " x ".join(f"{self.label(name)}={yaml_value(self.value(name))}" for name in names)

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
    def fills_the_world(self) -> bool:
        return self.world_size % dense_ranks(self.config) == 0

    @property
    def batch_unit(self) -> int:
        """Sequences of a micro-batch for each data-parallel rank, of which batches are multiples."""
        return (self.config.train.micro_batch_size or 1) * max(1, self.sizes["dp"])


class Broken(NamedTuple):
    """A rule that does not hold. `names`: the refused setting, then others that may be changed instead."""

    names: tuple[str, ...]
    rule: str
    numbers: tuple[int, ...] = ()
    advice: str = ""  # what would help and cannot be tried

    def speaks_of(self, names: Set[str]) -> bool:
        """Whether one of the settings, or a group of them, is named."""
        said = {*self.names, *re.findall(r"[a-z_]+\.[a-z_.]+[a-z_]|[a-z_]+(?==)", self.rule)}
        return not names.isdisjoint(said | {name.partition(".")[0] for name in said})


Rule = Callable[[Case], Iterable[Row]]


def broken(case: Case, rules: Sequence[Rule]) -> Iterator[Broken]:
    """What the rules find."""
    for wrong, words, sentence, *advice in (row for rule in rules for row in rule(case)):
        if wrong:
            names = tuple(full_name(word) for word in words.split() if not word.isdigit())
            numbers = tuple(int(word) for word in words.split() if word.isdigit())
            for at, name in enumerate(names):
                sentence = sentence.replace(f"{{{at}}}", case.show(name))
            yield Broken(names, sentence, numbers, *advice)


@cache
def full_name(word: str) -> str:
    """The setting that ends on these words, or the name of no setting as it is."""
    found = [name for name in SETTINGS if name == word or (word not in SETTINGS and name.endswith(f".{word}"))]
    assert len(found) < 2, f"{word} can be any of {found}"
    return found[0] if found else word

"""What would work where parallel.tp does not split the model; rules.py says what a rule is.

Every value of a remedy was tried on the whole config: it mends its problem and makes none. Sizes of parallel.tp mend
all problems with parallel.tp at once; where each of them needs another setting changed, too, both are named.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import gcd
from typing import Any

from megalite.config.advice import either
from megalite.config.model_rules import MODEL_RULES
from megalite.config.parallel_rules import (
    batch_sizes,
    layout_request,
    misfits,
    parallel_setting,
    parallel_sizes_are_built,
    tensor_misfits,
)
from megalite.config.problems import Problem
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, with_values, yaml_value
from megalite.parallel.layout_rules import broken_rules, divisors

TRIED = 64  # values of one setting, at most
COMPANIONS = ("parallel.sequence_parallel", "parallel.etp", "parallel.order", "train.global_batch_size")
JUDGES = (*MODEL_RULES, parallel_sizes_are_built)

Broken = Counter[tuple[str, str]]  # how often each rule finds fault with each setting


def model_splits_over_tensor_parallel_ranks(config: Config, world_size: int) -> Iterator[Problem]:
    misfits = list(tensor_misfits(config))
    if not misfits:
        return
    trial = _Trial(config, world_size)
    sizes = trial.tensor_parallel_sizes()
    for setting, value, rule in misfits:
        if setting == "parallel.sequence_parallel":
            ways = ["leave it out", sizes]
        elif setting == "model.vocab_multiple":
            ways = [f"model.vocab_multiple={config.parallel.tp} or more", sizes or trial.size_with_more()]
        else:
            ways = [sizes or trial.size_with_more(), trial.values(setting, value)]
        if setting == "train.seq_length":
            ways.append("parallel.sequence_parallel=false")
        yield Problem(setting, value, rule, ", or ".join(way for way in ways if way) or "parallel.tp=1")


class _Trial:
    """Tries changes of a config, each judged by every rule that reads what is changed."""

    def __init__(self, config: Config, world_size: int) -> None:
        self.config, self.world_size = config, world_size
        self.before = self._broken({})
        self.sizes = _nearest_first(divisors(gcd(config.model.num_attention_heads, world_size)), config.parallel.tp)

    def tensor_parallel_sizes(self) -> str:
        """`parallel.tp=1 or 2 or 4`: the nearest that split everything."""
        allowed = self._without("tensor")
        found = sorted(islice((n for n in self.sizes if self._broken({"parallel.tp": n}) <= allowed), 3))
        return f"parallel.tp={either(found)}" if found else ""

    def size_with_more(self) -> str:
        """`parallel.tp=2 with train.global_batch_size=6`: the nearest that needs more than one change."""
        allowed = self._without("tensor")
        for size in self.sizes:
            changes = self._with_companions(size, allowed)
            if self._broken(changes) <= allowed:
                first, *more = (f"{name}={yaml_value(value)}" for name, value in changes.items())
                return f"{first} with {' and '.join(more)}"
        return ""

    def values(self, setting: str, value: int) -> str:
        """`train.seq_length=100 or 105`, the nearest values that mend this setting's problem."""
        tp = self.config.parallel.tp
        if setting == "model.num_key_value_heads":
            tried: Iterable[int] = _nearest_first(divisors(self.config.model.num_attention_heads), value)
        else:
            tried = _multiples(tp, value)
        allowed = self._without("tensor", setting)
        works = (number for number in islice(tried, TRIED) if self._broken({setting: number}) <= allowed)
        found = sorted(islice(works, 2))
        return f"{setting}={either(found)}" if found else ""

    def _with_companions(self, size: int, allowed: Broken) -> dict[str, Any]:
        """The size and, of the settings that it may clash with, those that do."""
        changes: dict[str, Any] = {"parallel.tp": size}
        for setting in COMPANIONS:
            if any(name == setting for _, name in self._broken(changes) - allowed):
                if setting == "train.global_batch_size":
                    changes[setting] = batch_sizes(with_values(self.config, changes), self.world_size)[0]
                else:
                    changes[setting] = SETTINGS[setting].default
        return changes

    def _without(self, rule: str, setting: str | None = None) -> Broken:
        """What was broken before, less what a change must mend."""
        return Counter({key: n for key, n in self.before.items() if key != (rule, setting or key[1])})

    def _broken(self, changes: Mapping[str, Any]) -> Broken:
        changed = with_values(self.config, changes)
        found = Counter(misfits(changed, self.world_size))
        layout = broken_rules(layout_request(changed, self.world_size))
        found.update(("layout", parallel_setting(field)) for field, _ in layout)
        for rule in JUDGES:
            found.update((rule.__name__, problem.setting) for problem in rule(changed, self.world_size))
        return found


def _nearest_first(values: Iterable[int], value: int) -> list[int]:
    return sorted(values, key=lambda one: abs(one - value))


def _multiples(step: int, near: int) -> Iterator[int]:
    """Multiples of `step` above 0, the nearest to `near` first."""
    below = near // step * step
    above = below + step
    while True:
        if below > 0 and near - below <= above - near:
            yield below
            below -= step
        else:
            yield above
            above += step


TENSOR_RULES = (model_splits_over_tensor_parallel_ranks,)

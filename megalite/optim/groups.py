"""Learning rate, weight decay and eps of each parameter: those of its kind, unless a group of optimizer.groups has it,
scaled with the model. The first group whose pattern fits a name has the parameter. No torch import."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import NamedTuple

from megalite.config.schema import Config
from megalite.errors.problems import Problem, plain, refuse, several
from megalite.layout.parameters import ParameterRecord
from megalite.model.parameters import gpt_parameters
from megalite.model.scaling import factors_of, muon_factor

SHOWN = 3  # patterns that are offered


class UpdateRule(NamedTuple):
    """A parameter's learning rate as a factor of the schedule's, its weight decay, and its eps as a factor."""

    factor: float
    decay: float
    eps: float = 1.0


def update_rules(records: Iterable[ParameterRecord], config: Config) -> dict[str, UpdateRule]:
    """The rule of each parameter, by its name."""
    settings, muon, found = config.optimizer, config.optimizer.muon, dict[str, UpdateRule]()
    for record in records:
        _, scaled, eps = factors_of(record.role, config.model)
        factor, decay = 1.0, settings.weight_decay if record.decay else 0.0
        if settings.name == "muon" and record.stacked is not None:
            scaled, factor = muon_factor(record, config.model, muon), (muon.lr or settings.lr) / settings.lr
            decay = settings.weight_decay if muon.weight_decay is None else muon.weight_decay
        group = next((one for one in settings.groups if fnmatchcase(record.name, one["match"])), {})
        rate = group.get("lr", "1x")  # a peak, or a factor of the usual one: 0.1x
        factor = factor * float(rate[:-1]) if isinstance(rate, str) else rate / settings.lr
        found[record.name] = UpdateRule(factor * scaled, group.get("weight_decay", decay) / scaled, eps)
    return found


def group_names(records: Iterable[ParameterRecord], config: Config) -> dict[str, str]:
    """What metrics call the group of each parameter, by its name: the pattern that it fits, or how it is updated."""
    settings = config.optimizer

    def kind_of(record: ParameterRecord) -> str:
        if not record.decay:
            return "norms_and_biases"
        if not isinstance(record.place, int):
            return "embedding_and_head"
        return "muon_matrices" if settings.name == "muon" and record.stacked is not None else "adamw_matrices"

    def pattern_of(record: ParameterRecord) -> str | None:
        return next((one["match"] for one in settings.groups if fnmatchcase(record.name, one["match"])), None)

    return {record.name: pattern_of(record) or kind_of(record) for record in records}


def parameters_of_groups(config: Config) -> list[list[ParameterRecord]]:
    """The parameters of each group in the whole model, whose vocabulary need not be known yet."""
    model = replace(config.model, vocab_size=config.model.vocab_size or 1)
    left, found = gpt_parameters(model) if config.optimizer.groups else [], []
    for group in config.optimizer.groups:
        found.append([record for record in left if fnmatchcase(record.name, group["match"])])
        left = [record for record in left if not fnmatchcase(record.name, group["match"])]
    return found


def problems_of_groups(config: Config) -> Iterator[Problem]:
    """Groups that have no parameter."""
    for group, records in zip(config.optimizer.groups, parameters_of_groups(config), strict=True):
        if not records:
            names = [record.name for record in gpt_parameters(replace(config.model, vocab_size=1))]
            taken = any(fnmatchcase(name, group["match"]) for name in names)
            rule = "matches only parameters that earlier groups have" if taken else "matches no parameter of the model"
            hint = "put it before them" if taken else f"match: {' or '.join(_nearest(group['match'], names))}"
            yield Problem("optimizer.groups", group["match"], rule, hint)


def with_known_groups(config: Config) -> Config:
    """The config; UserError for groups that have no parameter."""
    refuse([*problems_of_groups(config)])
    return config


def lines_of_groups(config: Config) -> Iterator[str]:
    """What a run says of its groups."""
    for group, records in zip(config.optimizer.groups, parameters_of_groups(config), strict=True):
        given = ", ".join(f"{name} {plain(value)}" for name, value in group.items() if name != "match")
        size = several(sum(record.numel for record in records), "parameter")
        yield f"optimizer.groups: {group['match']} ({several(len(records), 'tensor')}, {size}): {given}"


def _nearest(pattern: str, names: Sequence[str]) -> list[str]:
    """The names of the model, all layers as one, that have words most like those of the pattern."""
    words = [word for word in re.split(r"\W+", pattern) if word]

    def likeness(name: str) -> float:
        return sum(max(SequenceMatcher(None, word, part).ratio() for part in name.split(".")) for word in words)

    return sorted({re.sub(r"\.\d+\.", ".*.", name): 0 for name in names}, key=likeness, reverse=True)[:SHOWN]

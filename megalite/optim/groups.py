"""Learning rate, weight decay and eps of each parameter: those of its kind, unless a group of optimizer.groups has it,
scaled with the model. The first group whose pattern fits a name has the parameter. No torch import."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

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


def group_of(name: str, groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The group that has the parameter of this name; an empty one where none has."""
    return next((group for group in groups if fnmatchcase(name, group["match"])), {})


def update_rules(records: Iterable[ParameterRecord], config: Config) -> dict[str, UpdateRule]:
    """The rule of each parameter, by its name."""
    settings, muon, found = config.optimizer, config.optimizer.muon, dict[str, UpdateRule]()
    for record in records:
        _, scaled, eps = factors_of(record.role, config.model)
        factor, decay = 1.0, settings.weight_decay if record.decay else 0.0
        if settings.name == "muon" and record.stacked is not None:
            scaled, factor = muon_factor(record, config.model, muon), (muon.lr or settings.lr) / settings.lr
            decay = settings.weight_decay if muon.weight_decay is None else muon.weight_decay
        group = group_of(record.name, settings.groups)
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

    return {record.name: group_of(record.name, settings.groups).get("match") or kind_of(record) for record in records}


def parameters_of_groups(config: Config) -> list[list[ParameterRecord]]:
    """The parameters of each group in the whole model."""
    groups = config.optimizer.groups
    owners = [(record, group_of(record.name, groups)) for record in _whole_model(config)] if groups else []
    return [[record for record, owner in owners if owner is group] for group in groups]


def _whole_model(config: Config) -> list[ParameterRecord]:
    """Its vocabulary need not be known yet."""
    return gpt_parameters(replace(config.model, vocab_size=config.model.vocab_size or 1))


def problems_of_groups(config: Config) -> Iterator[Problem]:
    """Groups that have no parameter, or leave nothing that decays by a schedule."""
    for group, records in zip(config.optimizer.groups, parameters_of_groups(config), strict=True):
        if not records:
            names = [record.name for record in _whole_model(config)]
            taken = any(fnmatchcase(name, group["match"]) for name in names)
            rule = "matches only parameters that earlier groups have" if taken else "matches no parameter of the model"
            hint = "put it before them" if taken else f"match: {' or '.join(_nearest(group['match'], names))}"
            yield Problem("optimizer.groups", group["match"], rule, hint)
    schedule, name = config.optimizer.weight_decay_schedule, "optimizer.weight_decay_schedule"
    rules = update_rules(_whole_model(config), config) if config.optimizer.groups else {}
    if rules and schedule != "constant" and not any(rule.decay for rule in rules.values()):
        rule = "has no effect with optimizer.groups, which leave no weight decay"
        yield Problem(name, schedule, rule, f"{name}=constant")


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

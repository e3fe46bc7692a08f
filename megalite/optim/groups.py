"""Learning rate and weight decay of each parameter: those of its kind, unless a group of optimizer.groups has it. The
first group whose pattern fits a name has the parameter. No torch import."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import NamedTuple

from megalite.config.groups import ParameterGroup
from megalite.config.schema import Config, OptimizerConfig
from megalite.errors.problems import Problem, plain, several
from megalite.layout.parameters import ParameterRecord
from megalite.model.parameters import gpt_parameters

SHOWN = 3  # patterns that are offered


class UpdateRule(NamedTuple):
    """What a parameter's learning rate is of the schedule's, and its weight decay."""

    factor: float
    decay: float


def update_rules(records: Iterable[ParameterRecord], settings: OptimizerConfig) -> dict[str, UpdateRule]:
    """The rule of each parameter, by its name."""
    muon, groups = settings.muon, groups_of(settings)
    of_matrices = (
        1.0 if muon.lr is None else muon.lr / settings.lr,
        settings.weight_decay if muon.weight_decay is None else muon.weight_decay,
    )
    found = {}
    for record in records:
        usual = (1.0, settings.weight_decay if record.decay else 0.0)
        usual = of_matrices if settings.name == "muon" and record.stacked is not None else usual
        group = group_of(record, groups)
        found[record.name] = UpdateRule(*(usual if group is None else group.applied(*usual, settings.lr)))
    return found


def groups_of(settings: OptimizerConfig) -> list[ParameterGroup]:
    return [ParameterGroup(**each) for each in settings.groups]


def group_of(record: ParameterRecord, groups: Sequence[ParameterGroup]) -> ParameterGroup | None:
    """The first group whose pattern fits."""
    return next((group for group in groups if fnmatchcase(record.name, group.match)), None)


def parameters_of_groups(config: Config) -> list[tuple[ParameterGroup, list[ParameterRecord]]]:
    """Each group with its parameters in the whole model, whose vocabulary need not be known yet."""
    groups, model = groups_of(config.optimizer), config.model
    records = gpt_parameters(replace(model, vocab_size=model.vocab_size or 1)) if groups else []
    owners = [group_of(record, groups) for record in records]
    return [(one, [each for each, owner in zip(records, owners, strict=True) if owner is one]) for one in groups]


def problems_of_groups(config: Config) -> Iterator[Problem]:
    """Groups that have no parameter."""
    for group in (group for group, records in parameters_of_groups(config) if not records):
        names = [record.name for record in gpt_parameters(replace(config.model, vocab_size=1))]
        taken = any(fnmatchcase(name, group.match) for name in names)
        rule = "matches only parameters that earlier groups have" if taken else "matches no parameter of the model"
        hint = "put it before them" if taken else f"match: {' or '.join(_nearest(group.match, names))}"
        yield Problem("optimizer.groups", group.match, rule, hint)


def lines_of_groups(config: Config) -> Iterator[str]:
    """What a run says of its groups."""
    for group, records in parameters_of_groups(config):
        given = [
            f"{name} {plain(value)}" for name in ("lr", "weight_decay") if (value := getattr(group, name)) is not None
        ]
        size = several(sum(record.numel for record in records), "parameter")
        yield f"optimizer.groups: {group.match} ({several(len(records), 'tensor')}, {size}): {', '.join(given)}"


def _nearest(pattern: str, names: Sequence[str]) -> list[str]:
    """The names of the model, all layers as one, that have words most like those of the pattern."""
    words = [word for word in re.split(r"[^\w]+", pattern) if word]

    def likeness(name: str) -> float:
        return sum(max(SequenceMatcher(None, word, part).ratio() for part in name.split(".")) for word in words)

    shapes = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return sorted(shapes, key=likeness, reverse=True)[:SHOWN]

"""Reads the entries of `phases` and finds what is wrong with them: names, values, order, and each phase's config."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from itertools import pairwise
from typing import Any

from megalite.config.derive import absolute_paths, derive
from megalite.config.layout import exchange_of
from megalite.config.overrides import of_type, unknown
from megalite.config.phases import UNTIL, ends_of, may_change, phases_of
from megalite.config.rule import outside
from megalite.config.rules import check
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, with_values
from megalite.config.step_plan import FOLLOW_LENGTH, horizon_of
from megalite.errors.problems import Problem

EXAMPLE = "phases=[{until: 0.8}, {lr: {schedule: linear, min_lr: 0}}]"


def read_phases(config: Config) -> tuple[Config, list[Problem]]:
    """The config with its phases' settings by their dotted names and of their types, and the problems with them."""
    found, problems, source = list[dict[str, Any]](), list[Problem](), config.data.source
    for number, entry in enumerate(config.phases, 1):
        read: dict[str, Any] = {UNTIL: entry[UNTIL]} if UNTIL in entry else {}
        for name, value in _flat({key: value for key, value in entry.items() if key != UNTIL}):
            try:
                read[name] = _value(name, value)
            except ValueError as error:
                problems.append(Problem(f"phases, {number}: {name}", value, str(error), _hint(name, value)))
        source = read.get("data.source", source)
        places = read.keys() & {"data.path", "data.validation"}
        read |= {name: absolute_paths(read[name], source) for name in places}
        found.append(read)
    config = replace(config, phases=[] if problems else found)
    if rule := _in_order(config):
        problems.append(Problem("phases", found, rule, f"each but the last with until, a step or a share: {EXAMPLE}"))
    return config, problems


def _flat(entry: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values: {train: {z_loss: 1e-4}} and {train.z_loss: 1e-4} are the same."""
    for key, value in entry.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in SETTINGS:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _value(name: str, value: Any) -> Any:
    """The value as the setting's type; ValueError with the rule that it breaks."""
    if name not in SETTINGS:
        raise ValueError("unknown setting")
    if not may_change(name):
        raise ValueError("is the same in all phases of a run")
    setting = SETTINGS[name]
    whole = isinstance(value, float) and value.is_integer() and setting.kind is int
    try:
        value = of_type(setting, int(value) if whole else value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"must be {setting.type_words}") from error
    if value is not None and (problem := outside(setting, value)):
        raise ValueError(problem.rule)
    return value


def _hint(name: str, value: Any) -> str:
    if name not in SETTINGS:
        return unknown(name, value).hint
    if not may_change(name):
        return f"set {name} for the whole run; what a phase may set is in docs/long_runs.md"
    return SETTINGS[name].words


def _in_order(config: Config) -> str:
    """What is wrong with the phases' ends; empty where nothing is."""
    for number, phase in enumerate(config.phases, 1):
        until: Any = phase.get(UNTIL)
        is_last = number == len(config.phases)
        if is_last and until is not None:
            return f"phase {number} is the last, and ends with the run: it has no until"
        if not is_last and not (type(until) in (int, float) and until > 0 and (until < 1 or until % 1 == 0)):
            return f"phase {number} has until={until}: neither a share between 0 and 1 nor a step"
    if config.phases and horizon_of(config.train) not in ("train.steps", "train.tokens"):
        return f"they need a run whose length is given in train.steps or train.tokens, not {horizon_of(config.train)}"
    ends = ends_of(config)
    back = [at for at, (one, other) in enumerate(pairwise([0, *ends]), 1) if other <= one]
    return f"phase {back[0]} ends at step {ends[back[0] - 1]}, where no step is left for it" if back else ""


def problems_of_phases(config: Config, world_size: int, doubtful: Set[str]) -> list[Problem]:
    """What the rules find in a later phase and not in the run's own settings."""
    if not config.phases:
        return []
    known, found = {one.setting for one in check(config, world_size, doubtful)}, list[Problem]()
    base = derive(config, world_size)
    for phase in phases_of(base, world_size):
        given = {name: None for name in FOLLOW_LENGTH if name in phase.config.derived}
        if exchange_of(phase.config) != exchange_of(base):  # whose groups the run has made
            rule = f"exchanges keys by {exchange_of(phase.config).name}, and the run by {exchange_of(base).name}"
            found.append(
                Problem(f"phases, {phase.number}", dict(phase.changes), rule, "one parallel.cp_comm that suits all")
            )
        for one in check(with_values(phase.config, given), world_size, doubtful):
            if one.setting not in known:
                found.append(replace(one, setting=f"phases, {phase.number}: {one.setting}"))
    return found

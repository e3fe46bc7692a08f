"""What every setting must keep on its own: its choices, its limits, and finite numbers."""

import math
from collections.abc import Collection, Iterator
from typing import Any

from megalite.config.problems import Problem
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, Setting, value_of, with_values, yaml_value
from megalite.config.suggest import nearest


def bounds(config: Config) -> Iterator[Problem]:
    """Choices, limits and finiteness of every setting on its own."""
    for setting in SETTINGS.values():
        value = value_of(config, setting.name)
        if value is not None and (problem := outside(setting, value)):
            yield problem


def outside(setting: Setting, value: Any) -> Problem | None:
    """The problem of a value of the right type that its setting does not allow."""
    unknown = [one for one in (value if isinstance(value, list) else [value]) if one not in setting.choices]
    if setting.choices and unknown:
        near = nearest(str(unknown[0]), setting.choices, cutoff=0.3)
        shown = near if isinstance(value, list) else f"{setting.name}={near}"
        first = f"{shown} is the nearest; " if near else ""
        return Problem(setting.name, value, "unknown choice", f"{first}choices: {', '.join(setting.choices)}")
    numbers = value if isinstance(value, list) else [value]
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        return Problem(setting.name, value, "must be finite", f"the default is {yaml_value(setting.default)}")
    broken = {
        "at_least": lambda number, limit: number < limit,
        "above": lambda number, limit: number <= limit,
        "at_most": lambda number, limit: number > limit,
        "below": lambda number, limit: number >= limit,
    }
    if any(broken[name](value, limit) for name, limit in setting.limits.items()):
        default = "null (derived)" if setting.default is None else yaml_value(setting.default)
        return Problem(setting.name, value, f"must be {setting.limit_words}", f"the default is {default}")
    return None


def with_defaults(config: Config, names: Collection[str]) -> Config:
    """A copy in which the named settings hold their defaults, so that rules can compute with the rest."""
    return with_values(config, {name: SETTINGS[name].default for name in names})

"""What every setting must keep on its own: its choices, its limits, finite numbers, and names that a file can have."""

import math
import os
from collections.abc import Collection, Iterator
from typing import Any

from megalite.config.problems import Problem
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, Setting, value_of, with_values, yaml_value
from megalite.config.suggest import nearest

PLACES = ("run_dir", "tokenizer", "data.path", "data.cache_dir", "checkpoint.init_from", "parallel.nccl_options")
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, of Linux's and macOS' file systems


def bounds(config: Config) -> Iterator[Problem]:
    """Choices, limits, finiteness and usable names of every setting on its own."""
    for setting in SETTINGS.values():
        value = value_of(config, setting.name)
        if value is None:
            continue
        if problem := outside(setting, value) or (unusable(setting.name, value) if setting.name in PLACES else None):
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


def unusable(name: str, value: Any) -> Problem | None:
    """The problem of a path, or one among several, that no file system would take; `name` is the setting's."""
    for path in map(str, value if isinstance(value, list) else [value]):
        expanded = os.fsencode(os.path.expanduser(path))
        longest = max(map(len, expanded.split(b"/")))
        if b"\0" in expanded:
            return Problem(name, value, "holds a character of code 0", "leave that out")
        if longest > LONGEST_NAME or len(expanded) > LONGEST_PATH:
            rule = f"a name in it has {longest:,} bytes, all of it {len(expanded):,}"
            allowed = f"file systems take names of {LONGEST_NAME} bytes and paths of {LONGEST_PATH:,}"
            return Problem(name, value, f"{rule}; {allowed}", "a shorter path")
        if expanded.startswith(b"~"):
            user = path.partition("/")[0]
            return Problem(name, value, f"there is no user {user[1:]}", f"./{path} for a folder of that name")
    return None


def with_defaults(config: Config, names: Collection[str]) -> Config:
    """A copy in which the named settings hold their defaults, so that rules can compute with the rest."""
    return with_values(config, {name: SETTINGS[name].default for name in names})

"""The bounds of every single setting: choices, limits, finite numbers, and paths that a file can have."""

import math
import operator
import os
from collections.abc import Iterator
from typing import Any

from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, Setting, value_of, yaml_value
from megalite.errors.problems import Problem
from megalite.errors.remedies import nearest

PLACES = (
    *("run_dir", "tokenizer", "data.path", "data.cache_dir", "checkpoint.init_from", "parallel.nccl_options"),
    "launch.status_file",
)
LONGEST_NAME = 255  # bytes of a file's name, in any usual file system
LARGEST, LARGEST_IN_LIST = 2**31 - 1, 2**63 - 1  # of whole numbers without a limit of their own
WITHIN = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def bounds(config: Config) -> Iterator[Problem]:
    """Choices, limits, finiteness and usable paths of every setting on its own."""
    for setting in SETTINGS.values():
        if (value := value_of(config, setting.name)) is not None:
            problem = outside(setting, value) or (setting.name in PLACES and unusable(setting.name, value))
            yield from [problem] if problem else []


def outside(setting: Setting, value: Any) -> Problem | None:
    """The problem with a value of the right type that the setting does not allow."""
    listed = isinstance(value, list)
    parts, limits = value if listed else [value], setting.limits
    most = limits.get("at_most", LARGEST_IN_LIST if listed else LARGEST)
    remedy = f"{setting.name}={yaml_value(setting.default)}"
    if setting.choices and (unknown := [one for one in parts if one not in setting.choices]):
        near = nearest(str(unknown[0]), setting.choices, cutoff=0.3)
        first = f"{'' if listed else f'{setting.name}='}{near} is the nearest; " if near else ""
        return Problem(setting.name, value, "unknown choice", f"{first}choices: {', '.join(setting.choices)}")
    if any(isinstance(one, float) and not math.isfinite(one) for one in parts):
        return Problem(setting.name, value, "must be finite", remedy)
    if not all(WITHIN[name](one, limit) for name, limit in limits.items() for one in parts):
        return Problem(setting.name, value, f"must be {setting.limit_words}", remedy)
    if any(isinstance(one, int) and one > most for one in parts):
        return Problem(setting.name, value, f"is more than {most:,}", remedy)
    return None


def unusable(name: str, value: Any) -> Problem | None:
    """The problem with a path, or with one of several, that no file system takes; `name` is the setting."""
    for path in map(os.path.expanduser, map(str, value if isinstance(value, list) else [value])):
        if path.startswith("~"):
            return Problem(name, value, "there is no user of this name", f"./{path} for a folder of that name")
        empty = not path and name != "tokenizer"  # its rule names the choices
        if empty or "\0" in path or any(len(os.fsencode(part)) > LONGEST_NAME for part in path.split("/")):
            return Problem(name, value, "no file can have this name", "another path")
    return None

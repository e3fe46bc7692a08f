"""The bounds of every single setting: choices, limits, finite numbers, and names that a file can have."""

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
# Sizes far beyond what anyone trains, and small enough to compute with and to list. The others fit into 64 bits.
LARGEST = {
    **dict.fromkeys(("num_layers", "first_stage_layers", "last_stage_layers", "recompute_layers"), 10_000),
    **dict.fromkeys(("global_batch_size", "micro_batch_size", "sample_tokens", "eval_batches"), 2**20),
    **dict.fromkeys(("tp", "cp", "pp", "vpp", "ep", "etp", "instances", "microbatch_group_size"), 2**20),
    **dict.fromkeys(("hidden_size", "ffn_hidden_size", "head_size", "vocab_multiple", "bpe_vocab_size"), 2**24),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "workers", "num_experts", "num_shared_experts"), 2**16
    ),
    **dict.fromkeys(("vocab_size", "max_positions", "seq_length", "loss_scale_window", "hysteresis"), 2**31 - 1),
}
WITHIN = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def bounds(config: Config) -> Iterator[Problem]:
    """Choices, limits, finiteness and usable names of every setting on its own."""
    for setting in SETTINGS.values():
        value = value_of(config, setting.name)
        if value is None:
            continue
        if problem := outside(setting, value) or (unusable(setting.name, value) if setting.name in PLACES else None):
            yield problem


def outside(setting: Setting, value: Any) -> Problem | None:
    """The problem with a value of the right type that the setting does not allow."""
    parts, limits = _parts(value), setting.limits.items()
    most = LARGEST.get(setting.leaf.rpartition(".")[2], 2**63 - 1)
    remedy = f"{setting.name}={yaml_value(setting.default)}"
    if setting.choices and (unknown := [one for one in parts if one not in setting.choices]):
        near = nearest(str(unknown[0]), setting.choices, cutoff=0.3)
        shown = near if isinstance(value, list) else f"{setting.name}={near}"
        first = f"{shown} is the nearest; " if near else ""
        rule, remedy = "unknown choice", f"{first}choices: {', '.join(setting.choices)}"
    elif any(isinstance(one, float) and not math.isfinite(one) for one in parts):
        rule = "must be finite"
    elif not all(WITHIN[name](one, limit) for name, limit in limits for one in parts):
        rule = f"must be {setting.limit_words}"
    elif any(isinstance(one, int) and abs(one) > most for one in parts):
        rule = f"is more than {most:,}"
    else:
        return None
    return Problem(setting.name, value, rule, remedy)


def _parts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def unusable(name: str, value: Any) -> Problem | None:
    """The problem with a path, or with one of several, that no file system takes; `name` is the setting."""
    for path in map(str, _parts(value)):
        place = os.path.expanduser(path)
        for part in (place, *place.split("/")):  # a name is too long wherever it stands
            try:
                os.lstat(part)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                pass
            except (OSError, ValueError) as error:
                return Problem(name, value, getattr(error, "strerror", None) or str(error), "another path")
        if place.startswith("~"):
            user = path.partition("/")[0]
            return Problem(name, value, f"there is no user {user[1:]}", f"./{path} for a folder of that name")
    return None

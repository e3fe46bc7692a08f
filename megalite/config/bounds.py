"""What every setting must keep on its own: its choices, its limits, finite numbers, and names that a file can have."""

import math
import operator
import os
from collections.abc import Collection, Iterator
from typing import Any

from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, Setting, value_of, with_values, yaml_value
from megalite.errors.problems import Problem
from megalite.errors.remedies import nearest

PLACES = ("run_dir", "tokenizer", "data.path", "data.cache_dir", "checkpoint.init_from", "parallel.nccl_options")
# Sizes far beyond what anyone trains, and small enough to compute with and to list. The others fit into 64 bits.
LARGEST = {
    **dict.fromkeys(("num_layers", "first_stage_layers", "last_stage_layers", "recompute_layers"), 10_000),
    **dict.fromkeys(("global_batch_size", "micro_batch_size", "sample_tokens", "eval_batches"), 2**20),
    **dict.fromkeys(("tp", "cp", "pp", "vpp", "ep", "etp", "instances", "microbatch_group_size"), 2**20),
    **dict.fromkeys(("hidden_size", "ffn_hidden_size", "head_size", "vocab_multiple", "bpe_vocab_size"), 2**24),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "workers"), 2**16),
    **dict.fromkeys(("vocab_size", "max_positions", "seq_length", "loss_scale_window", "hysteresis"), 2**31 - 1),
}
MOST_RAMP_SIZES = 10_000
WITHIN = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, of Linux's and macOS' file systems


def bounds(config: Config) -> Iterator[Problem]:
    """Choices, limits, finiteness and usable names of every setting on its own."""
    for setting in SETTINGS.values():
        value = value_of(config, setting.name)
        if value is None:
            continue
        if problem := outside(setting, value) or (unusable(setting.name, value) if setting.name in PLACES else None):
            yield problem
    ramp, full = config.train.batch_ramp, config.train.global_batch_size
    if ramp and len(ramp) == 3 and ramp[1] > 0 and (full - ramp[0]) // ramp[1] > MOST_RAMP_SIZES:
        rule = f"has more than {MOST_RAMP_SIZES:,} sizes up to train.global_batch_size={full}"
        yield Problem("train.batch_ramp", ramp, rule, "a larger increment")


def outside(setting: Setting, value: Any) -> Problem | None:
    """The problem of a value of the right type that its setting does not allow."""
    parts, limits = _parts(value), setting.limits.items()
    most = LARGEST.get(setting.leaf, 2**63 - 1)
    remedy = f"the default is {'null (derived)' if setting.default is None else yaml_value(setting.default)}"
    if setting.kind is not Any and any(one is None or isinstance(one, list | dict) for one in parts):
        rule, remedy = f"must be {setting.type_words}", "plain values in one list"
    elif setting.choices and (unknown := [one for one in parts if one not in setting.choices]):
        near = nearest(str(unknown[0]), setting.choices, cutoff=0.3)
        shown = near if isinstance(value, list) else f"{setting.name}={near}"
        first = f"{shown} is the nearest; " if near else ""
        rule, remedy = "unknown choice", f"{first}choices: {', '.join(setting.choices)}"
    elif any(isinstance(one, float) and not math.isfinite(one) for one in parts):
        rule = "must be finite"
    elif not all(WITHIN[name](value, limit) for name, limit in limits):
        rule = f"must be {setting.limit_words}"
    elif any(isinstance(one, int) and abs(one) > most for one in parts):
        rule = f"is more than {most:,}"
    else:
        return None
    return Problem(setting.name, value, rule, remedy)


def _parts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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

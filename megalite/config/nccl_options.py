"""Read the file of NCCL options: for each group, options of torch's ProcessGroupNCCL, in Megatron-LM's names.

    dp_cp: {cga_cluster_size: 2, max_ctas: 16}
    ep: {net_name: ib, is_high_priority_stream: true}

What the file does not say is NCCL's own choice. Values are passed on as they are; NCCL judges them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.config.user_files import read_yaml
from megalite.errors.problems import Problem, UserError
from megalite.errors.remedies import nearest

SETTING = "parallel.nccl_options"
# Megatron-LM's name of a group: ours with the same traffic. Those of which we form none are accepted, too.
GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp", "kv-replicas"),
    "dp_cp": ("dp-cp",),
    "intra_dp_cp": ("dp-cp-shard",),
    "pp": ("pp",),
    "embd": ("embedding",),
    "ep_dp": ("edp",),
    "intra_ep_dp": ("edp-shard",),
    "inter_ep_dp": ("edp-replicate", "dp-cp-replicate"),
    "intra_dist_opt_instance": ("world",),
    **dict.fromkeys(("dp", "cp", "hcp", "mp", "tp_cp", "tp_dp", "tp_dp_cp", "pos_embd"), ()),
    **dict.fromkeys(("ep", "ep_tp", "tp_ep_mp", "tp_ep_pp"), ()),
}
KEYS = {"cga_cluster_size": int, "min_ctas": int, "max_ctas": int, "net_name": str, "is_high_priority_stream": bool}
WORDS = {int: "a whole number", str: "text", bool: "true or false"}


def read_nccl_options(path: Path) -> dict[str, Mapping[str, Any]]:
    """The options of each group that the file names, by our group names; a UserError with everything wrong in it."""
    try:
        content = read_yaml(path, f"a YAML file that every rank can read, or {SETTING}=null")
    except UserError as error:
        raise UserError([replace(each, setting=SETTING, value=str(path)) for each in error.problems]) from error
    if problems := [Problem(SETTING, str(path), rule, remedy) for rule, remedy in _flaws(content)]:
        raise UserError(problems)
    return {ours: options for name, options in content.items() for ours in GROUPS[name]}


def _flaws(content: Any) -> Iterator[tuple[str, str]]:
    """What is wrong and what would be right."""
    if not isinstance(content, dict) or not content:
        yield "must be a mapping of groups", f"a mapping like dp_cp: {{max_ctas: 16}}, or {SETTING}=null"
        return
    for name, options in content.items():
        if name not in GROUPS:
            yield f"unknown group {name!r}", _known(str(name), GROUPS)
        elif not isinstance(options, dict):
            yield f"{name}: must be a mapping of keys", f"{name}: {{max_ctas: 16}}"
        else:
            for key, value in options.items():
                if key not in KEYS:
                    yield f"{name}: unknown key {key!r}", _known(str(key), KEYS)
                elif type(value) is not KEYS[key]:
                    yield f"{name}.{key}={value!r} must be {WORDS[KEYS[key]]}", f"correct it, or leave {key} out"


def _known(name: str, known: Mapping[str, Any]) -> str:
    meant = nearest(name, known)
    return f"{meant}? Known are {', '.join(known)}" if meant else f"one of {', '.join(known)}"

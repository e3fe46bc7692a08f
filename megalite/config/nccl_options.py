"""Read the file of NCCL options: for each group, options of torch's ProcessGroupNCCL, in Megatron-LM's names.

    dp_cp: {cga_cluster_size: 2, max_ctas: 16}
    ep: {net_name: ib, is_high_priority_stream: true}

What the file does not say is NCCL's own choice. Values are passed on as they are; NCCL judges them.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.config.user_files import read_yaml
from megalite.errors.problems import Problem, UserError

SETTING = "parallel.nccl_options"
# Megatron-LM's name of a group: ours with the same traffic. Those of which we form none are accepted, too.
GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp", "kv-replicas"),
    "dp_cp": ("dp-cp",),
    "intra_dp_cp": ("dp-cp-shard",),
    "cp": ("cp-alltoall", "cp-ring"),
    "tp_cp": ("tp-cp",),
    "pp": ("pp",),
    "embd": ("word-embedding",),
    "ep_dp": ("edp",),
    "intra_ep_dp": ("edp-shard",),
    "inter_ep_dp": ("edp-replicate", "dp-cp-replicate"),
    "intra_dist_opt_instance": ("world",),
    **dict.fromkeys(("dp", "hcp", "mp", "tp_dp", "tp_dp_cp", "pos_embd"), ()),
    "ep_tp": ("etp-ep",),
    **dict.fromkeys(("ep", "tp_ep_mp", "tp_ep_pp"), ()),
}
KEYS = {"cga_cluster_size": int, "min_ctas": int, "max_ctas": int, "net_name": str, "is_high_priority_stream": bool}
WORDS = {int: "a whole number", str: "text", bool: "true or false"}


def read_nccl_options(path: Path) -> dict[str, Mapping[str, Any]]:
    """The options of each group that the file names, by our group names; a UserError with everything wrong in it."""
    try:
        content = read_yaml(path, f"a YAML file that every rank can read, or {SETTING}=null")
    except UserError as error:
        raise UserError([replace(each, setting=SETTING, value=str(path)) for each in error.problems]) from error
    rules = ["must be a mapping of groups"] * (not isinstance(content, dict) or not content)
    for name, options in ({} if rules else content).items():
        if name not in GROUPS or not isinstance(options, dict):
            rules.append(f"{name!r} must be one of {', '.join(GROUPS)}, with a mapping of its keys")
            continue
        for key, value in options.items():
            if type(value) is not KEYS.get(key):
                known = ", ".join(f"{key} ({WORDS[kind]})" for key, kind in KEYS.items())
                rules.append(f"{name}.{key}={value!r}: the keys are {known}")
    if rules:
        remedy = f"groups and keys like dp_cp: {{max_ctas: 16}}, or {SETTING}=null"
        raise UserError([Problem(SETTING, str(path), rule, remedy) for rule in rules])
    return {ours: options for name, options in content.items() for ours in GROUPS[name]}

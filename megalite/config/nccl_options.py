"""Read the file of NCCL options: for each group, options of torch's ProcessGroupNCCL, in Megatron-LM's names.

    dp_cp: {cga_cluster_size: 2, max_ctas: 16}
    ep: {net_name: ib, is_high_priority_stream: true}

What the file does not say is NCCL's own choice. Values are passed on as they are; NCCL judges them.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.config.files import read_yaml
from megalite.errors.problems import Problem, UserError

SETTING = "parallel.nccl_options"
# Megatron-LM's name of a group: ours with the same traffic. Names of groups that are not formed here do nothing.
GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp", "kv-replicas"),
    "dp_cp": ("dp-cp",),
    "intra_dp_cp": ("dp-cp-shard",),
    "cp": ("cp-alltoall", "cp-ring"),
    "tp_cp": ("tp-cp",),
    "pp": ("pp-forward", "pp-backward"),
    "embd": ("word-embedding",),
    "ep_dp": ("edp",),
    "intra_ep_dp": ("edp-shard",),
    "inter_ep_dp": ("edp-replicate", "dp-cp-replicate"),
    "intra_dist_opt_instance": ("world",),
    "ep_tp": ("etp-ep",),
    **dict.fromkeys(("dp", "hcp", "mp", "tp_dp", "tp_dp_cp", "pos_embd", "ep", "tp_ep_mp", "tp_ep_pp"), ()),
}
KEYS = {"cga_cluster_size": int, "min_ctas": int, "max_ctas": int, "net_name": str, "is_high_priority_stream": bool}


def read_nccl_options(path: Path) -> dict[str, Mapping[str, Any]]:
    """The options of each group that the file names, by our group names; a UserError with everything wrong in it."""
    try:
        groups = read_yaml(path, f"a YAML file that every rank can read, or {SETTING}=null")
    except UserError as error:
        raise UserError([replace(each, setting=SETTING, value=str(path)) for each in error.problems]) from error
    wrong = [] if groups and isinstance(groups, dict) else ["a mapping"]
    for name, options in groups.items() if not wrong else ():
        known = name in GROUPS and isinstance(options, dict)
        pairs = options.items() if known else ()
        wrong += [] if known else [repr(name)]
        wrong += [f"{name}.{key}={value!r}" for key, value in pairs if type(value) is not KEYS.get(key)]
    if wrong:
        keys = ", ".join(f"{key} ({kind.__name__})" for key, kind in KEYS.items())
        rule = f"must map some of {', '.join(GROUPS)} to some of {keys}; is not: {', '.join(wrong)}"
        remedy = f"groups and keys like dp_cp: {{max_ctas: 16}}, or {SETTING}=null"
        raise UserError(Problem(SETTING, str(path), rule, remedy))
    return {ours: options for name, options in groups.items() for ours in GROUPS[name]}

"""What may change between a run and its continuation.

A change is refused if it makes the saved tensors meaningless or reorders the data: the model's mathematics, the seed,
the split and the mixture of the data, the optimizer, the dtype of the first moment. The sequence length may grow, and
rotary positions may change with it. Everything else may change on purpose (learning rate, batch, steps, layout,
logging). All of it is reported, so that no change goes unnoticed.
"""

from collections.abc import Mapping
from typing import Any

from megalite.config.settings import leaves, yaml_value
from megalite.errors.problems import Problem
from megalite.errors.words import plain

_LENGTH, _RAMP = "train.seq_length", "train.batch_ramp"
_FIXED = ("seed", "data.validation_fraction", "data.weights", "optimizer.name", "optimizer.moment_dtype", "model.")
_FREE = (  # beginnings of names; the model's leave the meaning of its parameters alone
    *("model.name", "model.dropout", "model.attention_dropout", "model.embedding_dropout", "model.init_std"),
    *("model.loss_chunk_tokens", "model.moe.aux_loss", "model.moe.z_loss_coeff", "model.moe.expert_bias_rate"),
    *("model.moe.capacity_factor", "model.moe.dispatcher"),
)
_WITH_LENGTH = (_LENGTH, "model.rope_")  # may change where the sequence length grows
_UNREMARKABLE = (
    *("run_dir", "run_name", "resume", "checkpoint.init_from"),
    *("launch.preflight", "launch.status_file", "train.max_minutes"),
)


def compare(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[list[Problem], list[str]]:
    """All refused differences, and the allowed ones in words. Settings that only one side knows are passed over."""
    before, now = leaves(saved), leaves(current)
    problems, changes = [], []
    grows = before.get(_LENGTH, 0) < now.get(_LENGTH, 0)
    if grows and now.get(_RAMP) is not None:
        rule = f"it counts samples, of which the run has consumed fewer when {_LENGTH} grows"
        problems.append(Problem(_RAMP, now[_RAMP], rule, f"{_RAMP}=null"))
    changed = {name for name in before.keys() & now.keys() if before[name] != now[name]}
    for name in sorted(changed.difference(_UNREMARKABLE)):
        fixed = name.startswith(_FIXED) and not name.startswith(_FREE)
        if not grows if name.startswith(_WITH_LENGTH) else fixed:
            rule = f"the run in this folder was started with {name}={plain(before[name])}"
            remedy = f"set {name}={yaml_value(before[name])}, or another run_dir for a new run"
            problems.append(Problem(name, now[name], rule, remedy))
        else:
            changes.append(f"{name} is now {plain(now[name])}; the run was at {plain(before[name])}")
    return problems, changes

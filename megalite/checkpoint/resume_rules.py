"""What may change between a run and its continuation.

A change is refused if it makes the saved tensors meaningless or reorders the data: the model's mathematics, the seed,
the split and the mixture of the data, the optimizer, the dtype of the first moment. The sequence length may grow, and
rotary positions may change with it. Everything else may change on purpose (learning rate, batch, steps, layout,
logging). All of it is reported, so that no change goes unnoticed.
"""

from collections.abc import Mapping
from typing import Any

from megalite.config.settings import yaml_value
from megalite.errors.problems import Problem
from megalite.errors.words import plain

# Fields of the model that leave the meaning of its parameters alone.
_FREE_IN_MODEL = (
    *("name", "dropout", "attention_dropout", "embedding_dropout", "init_std", "loss_chunk_tokens"),
    *("moe.aux_loss", "moe.aux_loss_coeff", "moe.z_loss_coeff", "moe.expert_bias_rate"),
    *("moe.capacity_factor", "moe.dispatcher"),
)
_NUM_EXPERTS = "model.moe.num_experts"
_LENGTH, _RAMP, _SCALING = "train.seq_length", "train.batch_ramp", "model.rope_scaling_factor"
_OPTIMIZER = "optimizer.name"
_FIXED = ("seed", "data.validation_fraction", "data.weights", _OPTIMIZER, "optimizer.moment_dtype")
_UNREMARKABLE = (
    *("run_dir", "run_name", "resume", "checkpoint.init_from"),
    *("launch.preflight", "launch.status_file", "train.max_minutes"),
)


def compare(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[list[Problem], list[str]]:
    """All refused differences, and the allowed ones in words. Settings that only one side knows are passed over."""
    # Runs from before there were experts are dense, those from before there was a choice of optimizers had AdamW.
    before, now = {_NUM_EXPERTS: 0, _OPTIMIZER: "adamw", **flatten(saved)}, flatten(current)
    problems, changes = [], []
    passed_over = set(_UNREMARKABLE)
    if not (before.get(_NUM_EXPERTS) and now.get(_NUM_EXPERTS)):  # the rest says nothing about a dense model
        passed_over |= {name for name in now if name.startswith("model.moe.")} - {_NUM_EXPERTS}
    if before.get(_SCALING) == now.get(_SCALING) == 1:  # nor do these of positions that are not scaled
        passed_over |= {name for name in now if name.startswith("model.rope_")} - {"model.rope_theta"}
    grows = before.get(_LENGTH, 0) < now.get(_LENGTH, 0)
    if grows and now.get(_RAMP) is not None:
        rule = f"counts samples, and of {_LENGTH}={now[_LENGTH]} the run has consumed fewer than of {before[_LENGTH]}"
        problems.append(Problem(_RAMP, now[_RAMP], rule, f"{_RAMP}=null where {_LENGTH} grows"))
    for name in before.keys() & now.keys():
        if before[name] == now[name] or name in passed_over:
            continue
        if _is_refused(name, grows):
            rule = f"the run in this folder was started with {name}={plain(before[name])}"
            if name == _LENGTH or name.startswith("model.rope_"):
                rule += "; it may only grow" if name == _LENGTH else f"; it may change where {_LENGTH} grows"
            remedy = f"set {name}={yaml_value(before[name])}, or another run_dir for a new run"
            problems.append(Problem(name, now[name], rule, remedy))
        else:
            changes.append(f"{name} is now {plain(now[name])}; the run was at {plain(before[name])}")
    return sorted(problems, key=lambda problem: problem.setting), sorted(changes)


def _is_refused(name: str, grows: bool) -> bool:
    """Whether this setting must not change, in a resume whose sequences grow or do not."""
    section, _, field = name.partition(".")
    if name == _LENGTH or name.startswith("model.rope_"):
        return not grows
    return name in _FIXED or (section == "model" and field not in _FREE_IN_MODEL)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat

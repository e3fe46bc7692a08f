"""Reads overrides one by one: can it be read, is there such a setting or choice, and what was meant instead?

Hydra would stop at the first that is wrong. Here each is refused by itself, with what would work.
"""

import re
import shlex
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalite.config.hydra_files import Files, in_one_line
from megalite.config.secrecy import ADVICE, HIDDEN, secret_name, secret_override, secret_value
from megalite.config.settings import EXPERIMENT, GROUPS, SETTINGS, leaves, outside, yaml_value
from megalite.errors.problems import NO_VALUE, Problem, UserError, shortened
from megalite.errors.remedies import nearest, similarity

FOREIGN_WORDS = {  # what the same is called in nanoGPT, Megatron-LM and transformers
    "optimizer.lr": "learning_rate",
    "optimizer.betas": "beta1 beta2",
    "optimizer.clip_grad": "grad_clip",
    "optimizer.zero": "use_distributed_optimizer zero_stage",
    "optimizer.initial_loss_scale": "loss_scale",
    "train.steps": "max_iters train_iters max_steps",
    "train.global_batch_size": "batch_size",
    "train.seq_length": "block_size sequence_length",
    "model.num_layers": "n_layer num_hidden_layers",
    "model.num_attention_heads": "n_head",
    "model.hidden_size": "n_embd",
    "parallel.tp": "tensor_model_parallel_size",
    "parallel.pp": "pipeline_model_parallel_size",
    "parallel.vpp": "virtual_pipeline_model_parallel_size",
    "parallel.ep": "expert_model_parallel_size",
    "parallel.etp": "expert_tensor_parallel_size",
    "model.moe.num_experts": "num_moe_experts num_local_experts n_routed_experts",
    "model.moe.top_k": "moe_router_topk num_experts_per_tok",
    "model.moe.ffn_hidden_size": "moe_ffn_hidden_size moe_intermediate_size",
    "model.moe.aux_loss_coeff": "router_aux_loss_coef",
    "precision": "dtype",
    "run_dir": "out_dir output_dir",
}
BY_WORD = {word: name for name, words in FOREIGN_WORDS.items() for word in words.split()}
LENGTH = "train.steps=N: the length of a run is in steps of train.global_batch_size x train.seq_length tokens"
INSTEAD = {  # of what there is no setting for
    **dict.fromkeys(("tokens", "train_tokens", "max_tokens", "num_train_epochs", "epochs"), LENGTH),
    "_target_": "parts are chosen by name: model=NAME, model.norm=rmsnorm, model.activation=swiglu",
}
PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)\Z)[a-z_./][\w./-]*", re.ASCII | re.IGNORECASE)  # a text everywhere
QUOTES = "quotes around texts with signs or blanks: 'NAME=\"a=b\"', in a list 'NAME=[\"a b\"]'"


def read_override(text: str, files: Files) -> Override:
    """The override as Hydra reads it; UserError where it is none, or an unknown choice."""
    text = text.lstrip("+")
    name, equals, given = text.partition("=")
    if secret_override(text):
        shown = name if equals and not secret_value(name) else HIDDEN
        raise UserError(Problem(shown, HIDDEN, "looks like a secret", ADVICE))
    for wrong, rule, hint in (
        (name.startswith("-"), "unknown option", f"settings are written name=value: {text.lstrip('-')}; see --help"),
        (name.startswith("~"), "settings cannot be removed", "give it another value, or null"),
        (not equals, "not an override: there is no '='", f"write {nearest_setting(name) or 'model'}=VALUE"),
        (name.startswith(("hydra.", "hydra/")), "has no effect: Hydra only composes", "leave it out, or --multirun"),
    ):
        if wrong:
            raise UserError(Problem(shortened(name), given or NO_VALUE, rule, hint))
    try:
        override = OverridesParser.create().parse_override(text)
        if not override.is_sweep_override():
            OmegaConf.create([override.value()])  # `${` and no end of it
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:  # too many digits or brackets
        raise UserError(Problem(name, shortened(given), f"cannot be read ({in_one_line(error)})", QUOTES)) from error
    if override.is_sweep_override():
        hint = f"for a list {name}=[{given}], for one text quotes around it, for a run per value --multirun"
        raise UserError(Problem(name, given, "several values", hint))
    choices = choices_of(override, files)
    if choices and override.value() not in choices:
        raise UserError(_unknown_choice(name, override.value(), choices))
    return override


def choices_of(override: Override, files: Files) -> list[str]:
    """The files of the group from which the override chooses one; empty where it sets a value."""
    name = override.get_key_element()
    return [] if "." in name or isinstance(override.value(), dict) else files.options(name)


def assignments(override: Override) -> dict[str, Any]:
    """Names and values: `model={norm: rmsnorm}` sets what `model.norm=rmsnorm` sets."""
    name, value = override.get_key_element(), override.value()
    return leaves(value, f"{name}.") if isinstance(value, dict) and name not in SETTINGS else {name: value}


def as_override(value: Any, quote: Quote = Quote.single) -> str:
    """The value as Hydra's command line reads it, so that it comes back as it is."""
    if isinstance(value, list):
        return "[" + ",".join(map(as_override, value)) + "]"
    if value is None or isinstance(value, bool | int | float):
        return yaml_value(value)
    return QuotedString(str(value).replace("${", "\\${"), quote).with_quotes()


def typed(name: str, value: Any) -> str:
    """NAME=VALUE as it is typed in a shell; a text is quoted where Hydra or the shell might read something else."""
    word = f"{name}={value if isinstance(value, str) else yaml_value(value)}"
    if not isinstance(value, str) or PLAIN.fullmatch(value):
        return word
    return shlex.quote(f"{name}={as_override(value, Quote.double)}")


def unknown(name: str, value: Any) -> Problem:
    """The problem with a name that is no setting, and what to write instead."""
    if secret_name(name) or secret_value(str(value)):  # in a file
        return Problem(name, HIDDEN, "looks like a secret", ADVICE)
    if name in GROUPS:
        return Problem(name, value, "is a group of settings", f"{name}=NAME of a file, or its settings: {name}.NAME")
    group, near = name.partition(".")[0], nearest_setting(name)
    inside = [setting.leaf for setting in SETTINGS.values() if setting.group == group]
    if instead := INSTEAD.get(name.rpartition(".")[2]):
        hint = instead
    elif near and (near not in SETTINGS or takes(near, value)):
        hint = f"did you mean {typed(near, value)} ?"
    elif near:
        hint = f"the nearest setting is {near}: {SETTINGS[near].words}"
    else:
        listed = f"settings of {group}: {', '.join(inside)}" if inside else f"groups: {', '.join(GROUPS)}"
        hint = f"{listed}; all are in docs/configuration.md"
    return Problem(name, value, "unknown setting", hint)


def _unknown_choice(group: str, choice: Any, choices: list[str]) -> Problem:
    near = nearest(str(choice), choices, cutoff=0.3)
    hints = [f"{one.name}={choice}" for one in SETTINGS.values() if one.leaf == group and takes(one.name, choice)]
    hint = next(iter(hints), f"{group}={near} is the nearest" if near else f"{group}={choices[0]}")
    rule = f"unknown choice: there is no conf/{group}/{choice}.yaml"
    return Problem(group, choice, rule, f"{hint}; choices: {', '.join(choices)}")


def takes(name: str, value: Any) -> bool:
    """Whether the value is of the setting's type and within its bounds."""
    try:
        return outside(SETTINGS[name], SETTINGS[name].typed(value)) is None
    except (ValueError, OverflowError):
        return False


def nearest_setting(name: str) -> str | None:
    """The setting or group that was most likely meant by a dotted name: by another project's word, or spelled alike."""
    group, _, leaf = name.rpartition(".")
    if name in SETTINGS or name in GROUPS:
        return name
    last = {one: one.rpartition(".")[2] for one in SETTINGS}
    same = [BY_WORD[leaf]] if leaf in BY_WORD else [one for one in SETTINGS if last[one] == leaf]
    if within := same or [one for one in SETTINGS if len(last[one]) > 4 and last[one] in leaf]:  # moe_layer_freq
        return max(within, key=lambda candidate: similarity(candidate, name))
    if group in GROUPS:  # only the last word is wrong: model.layers -> model.num_layers
        own = {setting.leaf: setting.name for setting in SETTINGS.values() if setting.group == group}
        return own.get(nearest(leaf, own, cutoff=0.5) or "")
    return nearest(name, (*SETTINGS, *GROUPS, EXPERIMENT), cutoff=0.7)

"""Reads overrides one by one: can it be read, is there such a setting or choice, and what was meant instead?

Hydra would stop at the first that is wrong. Here each is refused by itself, with what would work.
"""

import re
from collections.abc import Iterator
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalite.config.bounds import outside
from megalite.config.secrecy import ADVICE, HIDDEN, secret_name, secret_override, secret_value
from megalite.config.settings import EXPERIMENT, GROUPS, SETTINGS, leaves, yaml_value
from megalite.errors.problems import LONGEST_SHOWN, NO_VALUE, Problem, UserError, shortened
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
    "model.moe.first_dense_layers": "first_k_dense_replace",
    "model.moe.layer_freq": "decoder_sparse_step",
    "model.moe.score": "scoring_func",
    "model.moe.normalize_weights": "norm_topk_prob",
    "model.moe.scaling_factor": "routed_scaling_factor",
    "model.moe.num_groups": "n_group",
    "model.moe.top_k_groups": "moe_router_group_topk topk_group",
    "model.moe.aux_loss": "moe_router_load_balancing_type",
    "model.moe.aux_loss_coeff": "router_aux_loss_coef",
    "model.moe.expert_bias_rate": "moe_router_bias_update_rate",
    "precision": "dtype",
    "run_dir": "out_dir output_dir",
}
BY_WORD = {word: name for name, words in FOREIGN_WORDS.items() for word in words.split()}
LENGTH = "train.steps=N: the length of a run is in steps of train.global_batch_size x train.seq_length tokens"
INSTEAD = {  # of what there is no setting for
    **dict.fromkeys(("tokens", "train_tokens", "max_tokens", "num_train_epochs", "epochs"), LENGTH),
    "_target_": "parts are chosen by name: model=NAME, model.norm=rmsnorm, model.activation=swiglu",
}


def read_override(text: str, loader: ConfigLoader) -> Override:
    """The override as Hydra reads it (a `+` means nothing here); UserError where it is none, or an unknown choice."""
    text = text.lstrip("+")
    name, equals, given = text.partition("=")

    def refuse(rule: str, remedy: str, shown: str = name, value: Any = given) -> UserError:
        return UserError(Problem(shown, value, rule, remedy))

    if secret_override(text):
        raise refuse("looks like a secret", ADVICE, name if equals and not secret_value(name) else HIDDEN, HIDDEN)
    if name.startswith("-"):
        remedy = f"settings are written name=value, without dashes: {text.lstrip('-')}; see --help"
        raise refuse("unknown option", remedy)
    if name.startswith("~"):
        raise refuse("settings cannot be removed", "give it another value, or null", name, NO_VALUE)
    if not equals:
        remedy = f"write {nearest_setting(name) or 'model'}=VALUE; overrides look like train.steps=100"
        raise refuse("not an override: there is no '='", remedy, shortened(name), NO_VALUE)
    if name.startswith(("hydra.", "hydra/")):
        remedy = "leave it out; with --multirun, hydra.sweep, hydra/sweeper and hydra/launcher count"
        raise refuse("has no effect: Hydra composes the settings and does nothing else", remedy)
    try:
        override = OverridesParser.create().parse_override(text)
        value = override.value()
    except (HydraException, ValueError, RecursionError) as error:  # too many digits, too many brackets
        rule = f"cannot be read ({str(error).strip().splitlines()[0][:LONGEST_SHOWN]})"
        quoted = f"'{name}=\"a=b\"', in a list around each: '{name}=[\"a b\"]'"
        remedy = f"quotes around texts with signs or blanks: {quoted}"
        raise refuse(rule, remedy, value=shortened(given)) from error
    if override.is_sweep_override():
        remedy = f"for a list {name}=[{given}], for one text quotes around it, for a run per value --multirun"
        raise refuse("several values", remedy)
    choices = choices_of(override, loader)
    for one in value if isinstance(value, list) else [value]:
        if choices and one not in choices:
            raise UserError(_unknown_choice(name, one, choices))
    return override


def choices_of(override: Override, loader: ConfigLoader) -> list[str]:
    """The files of the group from which the override chooses one; empty where it sets a value."""
    name = override.get_key_element()
    return [] if "." in name or isinstance(override.value(), dict) else loader.get_group_options(name)


def assign(written: dict[str, Any], override: Override) -> Iterator[Problem]:
    """Sets the values of the override; a problem for each name that is no setting."""
    for name, value in _named_leaves(override).items():
        if name not in SETTINGS:
            yield unknown(name, value)
            continue
        try:
            OmegaConf.create([value])
            written[name] = value
        except OmegaConfBaseException as error:  # `${` and no end of it
            rule = f"cannot be read ({str(error).splitlines()[0][:LONGEST_SHOWN]})"
            yield Problem(name, value, rule, f"{name}={yaml_value(SETTINGS[name].default)}")


def _named_leaves(override: Override) -> dict[str, Any]:
    """Names and values: `model={norm: rmsnorm}` sets what `model.norm=rmsnorm` sets."""
    name, value = override.get_key_element(), override.value()
    return leaves(value, f"{name}.") if isinstance(value, dict) and name not in SETTINGS else {name: value}


def settings_named(override: Override) -> set[str]:
    """The settings that an override speaks of: all of a group whose file it chooses, every one for a recipe."""
    name = override.get_key_element()
    if name in SETTINGS or isinstance(override.value(), dict):  # {} names none of a group's
        return _named_leaves(override).keys() & SETTINGS.keys()
    return {setting.name for setting in SETTINGS.values() if setting.group == name or name not in GROUPS}


def as_override(value: Any) -> str:
    """The value as Hydra's command line reads it, so that it comes back as it is."""
    if isinstance(value, list):
        return "[" + ",".join(as_override(item) for item in value) + "]"
    if value is None or isinstance(value, bool | int | float):
        return yaml_value(value)
    return QuotedString(str(value).replace("${", "\\${"), Quote.single).with_quotes()


def unknown(name: str, value: Any) -> Problem:
    """The problem with a name that is no setting, and what to write instead."""
    group = name.partition(".")[0]
    if secret_name(name) or secret_value(str(value)):  # in a file
        return Problem(name, HIDDEN, "looks like a secret", ADVICE)
    if name in GROUPS:
        return Problem(name, value, "is a group of settings", f"{name}=NAME of a file, or its settings: {name}.NAME")
    if instead := INSTEAD.get(name.rpartition(".")[2]):
        remedy = instead
    elif (near := nearest_setting(name)) and (near not in SETTINGS or takes(near, value)):
        typed = value if isinstance(value, str) and re.fullmatch(r"[\w./-]+", value) else as_override(value)
        remedy = f"did you mean {near}={typed} ?"
    elif near:
        remedy = f"the nearest setting is {near}: {SETTINGS[near].words}; all are in docs/configuration.md"
    else:
        names = ", ".join(setting.leaf for setting in SETTINGS.values() if setting.group == group)
        listed = f"settings of {group}: {names}" if names else f"groups: {', '.join(GROUPS)}"
        remedy = f"{listed}; all are in docs/configuration.md"
    return Problem(name, value, "unknown setting", remedy)


def _unknown_choice(group: str, choice: Any, choices: list[str]) -> Problem:
    near = nearest(str(choice), choices, cutoff=0.3)
    hint = f"{group}={near} is the nearest; " if near else ""
    if group == "data" and {*str(choice)} & {*"./"}:
        hint = f"data=text data.path={choice}; "
    for setting in SETTINGS.values():
        if setting.leaf == group and takes(setting.name, choice):
            hint = f"{setting.name}={choice}, as {group} is a group of settings; "
    rule = f"unknown choice: there is no conf/{group}/{choice}.yaml"
    return Problem(group, choice, rule, f"{hint}choices: {', '.join(choices)}")


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

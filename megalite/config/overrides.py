"""Reads overrides one by one: can it be read, is there such a setting or choice, and what was meant instead?

Hydra would stop at the first that is wrong. Here each is refused by itself, with what would work.
"""

import re
import shlex
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalite.config.hydra_files import Files, in_one_line
from megalite.config.secrecy import secret_name, secret_override, secret_problem, secret_value
from megalite.config.settings import EXPERIMENT, GROUPS, SETTINGS, leaves, yaml_value
from megalite.errors.problems import NO_VALUE, Problem, UserError, shortened
from megalite.errors.words import nearest, similarity

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
    "run_dir": "output_dir",
}
BY_WORD = {word: name for name, words in FOREIGN_WORDS.items() for word in words.split()}
PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)\Z)[a-z_/][\w./-]*", re.ASCII | re.IGNORECASE)  # a text everywhere


class Override(NamedTuple):
    """What an override says: the file that a group takes, or values of settings, by their names."""

    group: str
    choice: str | None
    values: dict[str, Any]

    @property
    def names(self) -> set[str]:
        """The settings that the override decides: all of a group whose file it chooses, all there are for a recipe."""
        if self.choice is None:
            return {*self.values}
        return {one.name for one in SETTINGS.values() if one.group == self.group or self.group not in GROUPS}


def read_override(text: str, files: Files) -> Override:
    """What the override says to Hydra; UserError where it is none, or an unknown choice."""
    text = text.lstrip("+")
    name, equals, given = text.partition("=")
    if secret_override(text):
        raise UserError(secret_problem(name if equals and not secret_value(name) else "override"))
    if not equals or name.startswith(("-", "~", "hydra.", "hydra/")):
        hint = f"settings are written name=value: {nearest_setting(name.strip('-~')) or 'model'}=VALUE; see --help"
        raise UserError(Problem(shortened(name), given or NO_VALUE, "is no setting", hint))
    try:
        parsed = OverridesParser.create().parse_override(text)
        several = parsed.is_sweep_override()
        OmegaConf.create([None if several else parsed.value()])  # `${` and no end of it
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:  # too many digits or brackets
        hint = "quotes around texts with signs or blanks: 'NAME=\"a=b\"', in a list 'NAME=[\"a b\"]'"
        raise UserError(Problem(name, shortened(given), f"cannot be read ({in_one_line(error)})", hint)) from error
    if several:
        hint = f"{name}=[{given}] for a list, --multirun for a run per value"
        raise UserError(Problem(name, given, "several values", hint))
    name, value = parsed.get_key_element(), parsed.value()
    if isinstance(value, dict) and name not in SETTINGS:  # model={norm: rmsnorm} sets what model.norm=rmsnorm sets
        return Override(name, None, leaves(value, f"{name}."))
    if "." in name or not (choices := files.options(name)):
        return Override(name, None, {name: value})
    if value not in choices:
        meant = [f"{one.name}={value}" for one in SETTINGS.values() if one.leaf == name and one.takes(value)]
        near = nearest(str(value), choices, cutoff=0.3)
        hint = (meant or [f"{name}={near} is the nearest" if near else f"{name}={choices[0]}"])[0]
        rule = f"unknown choice: there is no conf/{name}/{value}.yaml"
        raise UserError(Problem(name, value, rule, f"{hint}; choices: {', '.join(choices)}"))
    return Override(name, str(value), {})


def as_override(value: Any) -> str:
    """The value as Hydra's command line reads it, so that it comes back as it is."""
    if isinstance(value, list):
        return "[" + ",".join(map(as_override, value)) + "]"
    if not isinstance(value, str) or PLAIN.fullmatch(value):
        return yaml_value(value)
    return QuotedString(value.replace("${", "\\${"), Quote.double).with_quotes()


def typed(name: str, value: Any) -> str:
    """NAME=VALUE as it is typed in a shell."""
    return shlex.quote(f"{name}={as_override(value)}")


def unknown(name: str, value: Any) -> Problem:
    """The problem with a name that is no setting, and what to write instead."""
    if secret_name(name) or secret_value(str(value)):  # in a file
        return secret_problem(name)
    if name in GROUPS:
        return Problem(name, value, "is a group of settings", f"{name}=NAME of a file, or its settings: {name}.NAME")
    hint = "all settings are in docs/configuration.md"
    if near := nearest_setting(name):
        fits = near not in SETTINGS or SETTINGS[near].takes(value)
        hint = f"did you mean {typed(near, value) if fits else f'{near}: {SETTINGS[near].words}'} ?"
    return Problem(name, value, "unknown setting", hint)


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

"""Weights of a transformers folder (hf/families/) as logical parameters. Reads config.json and safetensors only.

No model of transformers is built, nothing is downloaded and nothing is unpickled. Whatever does not fit (another shape,
missing or unexpected tensors) is refused, all of it in one message.
"""

import re
from collections.abc import Container, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.config.model_folder import (
    OTHER_MODEL,
    SETTING,
    folder_problem,
    imported_model_settings,
    read_model_file,
    settings_of,
)
from megalite.config.schema import ModelConfig
from megalite.config.settings import yaml_value
from megalite.config.user_files import read_object
from megalite.errors.problems import Problem, UserError, refuse
from megalite.hf.families import FAMILIES
from megalite.hf.families.family import differences
from megalite.hf.tensors import HEAD, Source, sources

FLOATING = ("F64", "F32", "F16", "BF16")
NOT_WEIGHTS = re.compile(r"attn\.(masked_)?bias$|rotary_emb\.inv_freq$")  # buffers that older versions saved
Stored = dict[str, tuple[Any, str]]  # by name in `sources`: the open file, and the tensor's name there


def import_model(
    folder: str | Path, config: ModelConfig, names: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(logical name, tensor of the logical shape, in the dtype of the file) for every parameter of `config`, or for
    those of `names`. A dense model for a `config` with experts gives its MLP for each expert, and no router.

    All names and shapes are checked before the first is read; vocabulary rows that pad the table are zero.
    """
    folder = Path(folder)
    about, settings = read_model_file(folder), imported_model_settings(folder)
    family = FAMILIES[about["model_type"]]
    config = replace(config, vocab_size=config.vocab_size or settings["vocab_size"])
    problems = []
    for name, theirs in differences(settings, settings_of(config)).items():
        override, ours = f"model.{name}={yaml_value(theirs)}", attrgetter(name)(config)
        problems.append(Problem(f"model.{name}", ours, f"is {theirs} in the model of {folder}", override))
    if config.moe.num_experts and not family.has_experts:  # each expert starts as the MLP
        wanted = {"moe.ffn_hidden_size": settings["ffn_hidden_size"], "moe.num_shared_experts": 0}
        wanted |= {"moe.num_experts": 0} if settings["bias"] else {}  # experts have no biases
        wrong = {name: value for name, value in wanted.items() if attrgetter(name)(config) != value}
        rule = f"the MLP of {folder} becomes each expert, as wide and without biases, and none is shared"
        problems += [
            Problem(f"model.{name}", attrgetter(name)(config), rule, f"model.{name}={yaml_value(value)}")
            for name, value in wrong.items()
        ]
    refuse(problems)
    stored = _stored_tensors(folder, family.prefix)
    experts = config.moe.num_experts if family.has_experts else 1
    if len(stored) < len(config.expert_layers) * experts or len(stored) < config.num_layers:  # before all are listed
        rule = f"must have the tensors of {config.num_layers:,} layers, as config.json says, and holds {len(stored):,}"
        raise UserError(folder_problem(folder, rule))
    wanted = sources(family.model_type, config)
    problems = [*_misfits(folder, stored, wanted, ignored={HEAD} if config.tie_embeddings else set())]
    if problems and family.architecture not in str(kinds := about.get("architectures") or family.architecture):
        rule = f"its tensors are not those of {family.architecture}, the part that is read here"
        problems = [Problem(f"{folder / 'config.json'}: architectures", kinds, rule, OTHER_MODEL)]
    refuse(problems)
    if config.tie_embeddings and HEAD in stored:
        _check_tied(folder, stored, [*wanted["embedding.word.weight"].tensors])
    return _read(folder, stored, {name: source for name, source in wanted.items() if names is None or name in names})


def _stored_tensors(folder: Path, prefix: str) -> Stored:
    """Every tensor in the safetensors files of the folder. Old folders leave the prefix of the names out."""
    if (adapter := folder / "adapter_config.json").exists():
        rule = "an adapter beside the weights is not applied"
        raise UserError(Problem(SETTING, str(adapter), rule, "merge it (merge_and_unload), and save_pretrained"))
    index, names = folder / "model.safetensors.index.json", {"model.safetensors"}
    if index.exists() and not (folder / "model.safetensors").exists():
        parts = read_object(index).get("weight_map")
        if not isinstance(parts, dict):
            raise UserError(folder_problem(index, "must be an index of safetensors files"))
        names = {*map(str, parts.values())}
        if any(Path(name).name != name or not name for name in names):
            raise UserError(folder_problem(index, "must name files in its folder alone"))
    stored: Stored = {}
    for path in (folder / name for name in sorted(names)):
        try:
            file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            rule = f"must be a complete safetensors file ({error}); pickled weights (*.bin) are never loaded"
            raise UserError(folder_problem(path, rule)) from error
        for name in file.keys():  # noqa: SIM118
            known = name == HEAD or name.startswith(prefix)
            stored[name if known else prefix + name] = file, name
    return stored


def _misfits(folder: Path, stored: Stored, wanted: dict[str, Source], ignored: set[str]) -> Iterator[Problem]:
    """Every tensor that is missing, unexpected, or of another shape or kind."""
    shapes = {name: shape for source in wanted.values() for name, shape in source.tensors.items()}
    rules = [f"must have the tensor {name}" for name in shapes if name not in stored]
    for name, (file, full_name) in stored.items():
        if name in shapes:
            header = file.get_slice(full_name)
            if tuple(header.get_shape()) != shapes[name]:
                shape = f"{list(shapes[name])} of config.json, not {header.get_shape()}"
                rules.append(f"{full_name} must have the shape {shape}")
            if header.get_dtype() not in FLOATING:
                rules.append(f"{full_name} must be one of {', '.join(FLOATING)}, not {header.get_dtype()}")
        elif not NOT_WEIGHTS.search(name) and name not in ignored:
            rules.append(f"must have no tensors but the model's own, and holds {full_name}")
    return (folder_problem(folder, rule) for rule in rules)


def _check_tied(folder: Path, stored: Stored, embedding: list[str]) -> None:
    """UserError for a head of other values: transformers then uses it, whatever config.json says."""
    [own, head] = (file.get_tensor(full_name) for file, full_name in map(stored.__getitem__, [*embedding, HEAD]))
    if not torch.equal(own, head):
        rule = f"tie_word_embeddings=true, and {HEAD} is another matrix than the embedding"
        raise UserError(Problem(SETTING, str(folder), rule, "tie_word_embeddings=false in its config.json"))


def _read(folder: Path, stored: Stored, wanted: dict[str, Source]) -> Iterator[tuple[str, Tensor]]:
    def finite(part: str) -> Tensor:
        file, full_name = stored[part]
        tensor: Tensor = file.get_tensor(full_name)
        if not torch.isfinite(tensor).all():
            raise UserError(folder_problem(folder, f"must hold finite numbers, unlike {full_name}"))
        return tensor

    for name, source in wanted.items():
        yield name, source.form.join(*map(finite, source.tensors))

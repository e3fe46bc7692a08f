"""Weights of a transformers folder (hf/families/) as logical parameters. Reads config.json and safetensors only.

No model of transformers is built, nothing is downloaded and nothing is unpickled. What does not fit (another shape,
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
MOST_NAMED = 20  # tensors that do not fit
Stored = dict[str, tuple[Any, str]]  # by name in `sources`: the open file, and the tensor's name there


def import_model(
    folder: str | Path, config: ModelConfig, names: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(logical name, tensor of the logical shape, in the dtype of the file) for every parameter of `config`, or for
    those of `names`. A dense model for a `config` with experts gives its MLP for each expert, and no router.

    All names and shapes are checked before the first is read; vocabulary rows that pad the table are zero.
    """
    folder = Path(folder)
    family, settings = FAMILIES[read_model_file(folder)["model_type"]], imported_model_settings(folder)
    config = replace(config, vocab_size=config.vocab_size or settings["vocab_size"])
    others = differences(settings, settings_of(config))
    if config.moe.num_experts and not family.has_experts:  # the MLP is every expert, and experts have no biases
        experts = {"moe.ffn_hidden_size": settings["ffn_hidden_size"], "moe.num_shared_experts": 0}
        experts |= {"moe.num_experts": 0} if settings["bias"] else {}
        others |= {name: value for name, value in experts.items() if attrgetter(name)(config) != value}
    problems = []
    for name, value in others.items():
        override, ours = f"model.{name}={yaml_value(value)}", attrgetter(name)(config)
        problems.append(Problem(f"model.{name}", ours, f"is {value} in the model of {folder}", override))
    refuse(problems)
    stored, wanted = _stored_tensors(folder, family.prefix), sources(family, config)
    refuse([*_misfits(folder, stored, wanted, ignored={HEAD} if config.tie_embeddings else set())][:MOST_NAMED])
    if config.tie_embeddings and HEAD in stored:  # transformers uses it, whatever config.json says
        [own, head] = (_tensor(folder, stored, name) for name in [*wanted["embedding.word.weight"].tensors, HEAD])
        if not torch.equal(own, head):
            rule = f"tie_word_embeddings=true, and {HEAD} is another matrix than the embedding"
            raise UserError(Problem(SETTING, str(folder), rule, "tie_word_embeddings=false in its config.json"))
    return (
        (name, source.form.join(*(_tensor(folder, stored, part) for part in source.tensors)))
        for name, source in wanted.items()
        if names is None or name in names
    )


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
        names = {Path(str(name)).name for name in parts.values()}
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
    for name in [*shapes, *(stored.keys() - shapes.keys() - ignored)]:
        if name not in stored:
            yield folder_problem(folder, f"must have the tensor {name}")
        elif name in shapes:
            header = stored[name][0].get_slice(stored[name][1])
            shape, kind = tuple(header.get_shape()), header.get_dtype()
            if shape != shapes[name] or kind not in FLOATING:
                rule = f"must have {name} of the shape {[*shapes[name]]}, in one of {', '.join(FLOATING)}"
                yield folder_problem(folder, f"{rule}, not {kind} {[*shape]}")
        elif not NOT_WEIGHTS.search(name):
            yield folder_problem(folder, f"must have no tensors but the model's own, and holds {name}")


def _tensor(folder: Path, stored: Stored, name: str) -> Tensor:
    file, full_name = stored[name]
    tensor: Tensor = file.get_tensor(full_name)
    if not torch.isfinite(tensor).all():
        raise UserError(folder_problem(folder, f"must hold finite numbers, unlike {full_name}"))
    return tensor

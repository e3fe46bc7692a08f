"""Weights of a transformers GPT-2, Llama or Qwen3 folder as logical parameters. Reads config.json and safetensors only.

No model of transformers is built, nothing is downloaded and nothing is unpickled. Whatever does not fit (another shape,
missing or unexpected tensors, non-finite values) is refused, all of it in one message.
"""

import re
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.config.model_folder import SETTING, folder_problem, imported_model_settings, read_model_file
from megalite.config.schema import ModelConfig
from megalite.config.settings import yaml_value
from megalite.config.user_files import read_object
from megalite.errors.problems import Problem, UserError
from megalite.hf.tensors import HEAD, PREFIX, Source, sources

FLOATING = ("F64", "F32", "F16", "BF16")
NOT_WEIGHTS = re.compile(r"attn\.(masked_)?bias$|rotary_emb\.inv_freq$")  # buffers that older versions saved
Stored = dict[str, tuple[Any, str]]  # by name in `sources`: the open file, and the tensor's name there


def import_model(
    folder: str | Path, config: ModelConfig, names: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(logical name, tensor of the logical shape, in the dtype of the file) for every parameter of `config`, or for
    those of `names`.

    All names and shapes are checked before the first is read; vocabulary rows that pad the table are zero.
    """
    folder = Path(folder)
    family, settings = read_model_file(folder)["model_type"], imported_model_settings(folder)
    config = replace(config, vocab_size=config.vocab_size or settings["vocab_size"])
    problems = []
    for name, theirs in settings.items():
        if (ours := getattr(config, name)) != theirs:
            override = f"model.{name}={yaml_value(theirs)}"
            problems.append(Problem(f"model.{name}", ours, f"is {theirs} in the model of {folder}", override))
    if problems:
        raise UserError(problems)
    wanted = sources(family, config)
    stored = _stored_tensors(folder, PREFIX[family])
    _check(folder, stored, wanted, ignored={HEAD} if config.tie_embeddings else set())
    return _read(folder, stored, {name: source for name, source in wanted.items() if names is None or name in names})


def _stored_tensors(folder: Path, prefix: str) -> Stored:
    """Every tensor in the safetensors files of the folder. Old folders leave the prefix of the names out."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    paths = [single]
    if not single.exists():
        if not index.exists():
            rule = "must hold model.safetensors or model.safetensors.index.json"
            remedy = "pickled weights (*.bin) are never loaded: save the model again with save_pretrained(FOLDER)"
            raise UserError(Problem(SETTING, str(folder), rule, remedy))
        parts = read_object(index).get("weight_map")
        if not isinstance(parts, dict):
            raise UserError(folder_problem(index, "must be an index of safetensors files"))
        paths = [folder / Path(str(name)).name for name in sorted(set(map(str, parts.values())))]
    stored: Stored = {}
    problems = []
    for path in paths:
        try:
            file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            problems.append(folder_problem(path, f"must be a complete safetensors file ({error})"))
            continue
        for name in file.keys():  # noqa: SIM118
            known = name == HEAD or name.startswith(prefix)
            stored[name if known else prefix + name] = file, name
    if problems:
        raise UserError(problems)
    return stored


def _check(folder: Path, stored: Stored, wanted: dict[str, Source], ignored: set[str]) -> None:
    """UserError for every tensor that is missing, unexpected, or of another shape or kind."""
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
    if rules:
        raise UserError([folder_problem(folder, rule) for rule in rules])


def _read(folder: Path, stored: Stored, wanted: dict[str, Source]) -> Iterator[tuple[str, Tensor]]:
    problems = []
    for name, source in wanted.items():
        parts = []
        for file, full_name in (stored[part] for part in source.tensors):
            parts.append(file.get_tensor(full_name))
            if not torch.isfinite(parts[-1]).all():
                problems.append(folder_problem(folder, f"must hold finite numbers, unlike {full_name}"))
        yield name, source.form.join(*parts)
    if problems:
        raise UserError(problems)

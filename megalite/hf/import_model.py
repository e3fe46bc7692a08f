"""Weights of a transformers GPT-2, Llama or Qwen3 folder as logical parameters. Reads config.json and safetensors only.

No model of transformers is built, nothing is downloaded and nothing is unpickled. Whatever does not fit (another shape,
missing or unexpected tensors, non-finite values) is refused, all of it in one message.
"""

import json
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
from megalite.errors.problems import Problem, UserError
from megalite.hf.tensors import HEAD, PREFIX, Source, sources
from megalite.layout.parameters import ParameterRecord
from megalite.model.parameters import gpt_parameters

FLOATING = ("F64", "F32", "F16", "BF16")
NOT_WEIGHTS = re.compile(r"attn\.(masked_)?bias$|rotary_emb\.inv_freq$")  # buffers that older versions saved


def imported_context_length(folder: str | Path) -> int:
    """The sequence length that the folder's model was made for."""
    found = read_model_file(Path(folder))
    key = "n_positions" if found["model_type"] == "gpt2" else "max_position_embeddings"
    length = found.get(key, 1024)
    if not isinstance(length, int) or length < 1:
        raise UserError(folder_problem(Path(folder) / "config.json", f"must have a positive integer as {key}"))
    return length


def import_model(
    folder: str | Path, config: ModelConfig, names: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(logical name, tensor of the logical shape, in the dtype of the file) for every parameter of `config`, or for
    those of `names`.

    All names and shapes are checked before the first is read; vocabulary rows that pad the table are zero.
    """
    folder = Path(folder)
    found = read_model_file(folder)
    settings = imported_model_settings(folder)
    config = replace(config, vocab_size=config.vocab_size or settings["vocab_size"])
    differences = _differences(folder, settings, config)
    if differences:
        raise UserError(differences)
    files = _open_files(folder)
    wanted = sources(found["model_type"], config)
    tensors = _check_tensors(folder, found["model_type"], files, wanted, config.tie_embeddings)
    records = [record for record in gpt_parameters(config) if names is None or record.name in names]
    return _read(folder, tensors, wanted, records)


def _differences(folder: Path, settings: dict[str, Any], config: ModelConfig) -> list[Problem]:
    """One problem for every setting in which `config` is not the folder's model."""
    problems = []
    for name, theirs in settings.items():
        ours = getattr(config, name)
        if ours != theirs:
            override = f"model.{name}={json.dumps(theirs) if isinstance(theirs, bool) else theirs}"
            problems.append(Problem(f"model.{name}", ours, f"is {theirs} in the model of {folder}", override))
    return problems


def _open_files(folder: Path) -> list[Any]:
    """The safetensors files of the folder, headers read."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    paths = [single]
    if index.exists() and not single.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UserError(folder_problem(index, f"must be an index of safetensors files ({error!r})")) from error
        paths = [folder / Path(name).name for name in sorted(names)]
    elif not single.exists():
        remedy = (
            "pickled weights (*.bin) are never loaded: save the model again with transformers' "
            "save_pretrained(FOLDER), which writes safetensors"
        )
        raise UserError(
            Problem(SETTING, str(folder), "must hold model.safetensors or model.safetensors.index.json", remedy)
        )
    files, problems = [], []
    for path in paths:
        try:
            files.append(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            problems.append(folder_problem(path, f"must be a complete safetensors file ({error})"))
    if problems:
        raise UserError(problems)
    return files


def _check_tensors(
    folder: Path, family: str, files: list[Any], wanted: dict[str, Source], tied: bool
) -> dict[str, tuple[Any, str]]:
    """Every wanted tensor, without prefix, to its file and its name there; a UserError for all that does not fit."""
    prefix = PREFIX[family]
    present = {name.removeprefix(prefix): (file, name) for file in files for name in file.keys()}  # noqa: SIM118
    shapes = {name: shape for source in wanted.values() for name, shape in source.tensors.items()}
    problems = [folder_problem(folder, f"must have the tensor {name}") for name in shapes if name not in present]
    for name, (file, full_name) in present.items():
        if name not in shapes:
            if not (NOT_WEIGHTS.search(name) or (tied and name == HEAD)):
                problems.append(
                    folder_problem(folder, f"must have no tensors but the model's own, and holds {full_name}")
                )
            continue
        header = file.get_slice(full_name)
        if tuple(header.get_shape()) != shapes[name]:
            rule = f"{full_name} must have the shape {list(shapes[name])} of config.json, not {header.get_shape()}"
            problems.append(folder_problem(folder, rule))
        if header.get_dtype() not in FLOATING:
            rule = f"{full_name} must be one of {', '.join(FLOATING)}, not {header.get_dtype()}"
            problems.append(folder_problem(folder, rule))
    if problems:
        raise UserError(problems)
    return {name: present[name] for name in shapes}


def _read(
    folder: Path, tensors: dict[str, tuple[Any, str]], wanted: dict[str, Source], records: list[ParameterRecord]
) -> Iterator[tuple[str, Tensor]]:
    problems = []
    for record in records:
        source = wanted[record.name]
        parts = []
        for name in source.tensors:
            file, full_name = tensors[name]
            parts.append(file.get_tensor(full_name))
            if not torch.isfinite(parts[-1]).all():
                problems.append(folder_problem(folder, f"must hold finite numbers, unlike {full_name}"))
        yield record.name, source.assemble(*parts)
    if problems:
        raise UserError(problems)

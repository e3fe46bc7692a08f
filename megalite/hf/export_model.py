"""Logical parameters as a folder that transformers loads: json files and safetensors. The inverse of import_model.

The folder is complete or not there: it is written under another name beside its own and renamed. What is written is a
function of the parameters alone, so exports of equal parameters are equal files, whatever layout trained them. They
are taken one at a time; memory holds one file of the export beside what the caller holds.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megalite.config.families import ARCHITECTURE, FAMILIES, describe, other_settings
from megalite.config.schema import ModelConfig
from megalite.errors.problems import NO_VALUE, Problem, UserError
from megalite.hf.tensors import Source, name_in_file, sources
from megalite.model.parameters import gpt_parameters

MAX_FILE_BYTES = 5 * 10**9  # transformers' 5GB
NO_FILES: Mapping[str, bytes] = MappingProxyType({})
_NAME = "model"
_UNITS = {"": 1, **{f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)}}
_UNITS |= {f"{letter}IB": 1024**n for n, letter in enumerate("KMGT", 1)}


def export_model(
    values: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    folder: Path,
    *,
    dtype: torch.dtype,
    context_length: int,
    end_of_document: int | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    others: Mapping[str, bytes] = NO_FILES,
) -> None:
    """Write `folder` (new or empty): config.json, generation_config.json, model.safetensors or its parts with their
    index, and `others` (by name: what belongs to it besides the model).

    `values` are (logical name, tensor of the logical shape on any device) in the order of `gpt_parameters(config)`, as
    `import_model` and `start_values` give them; they are rounded to `dtype`. `config` is resolved (no None left).
    `context_length` is what a family with rotary positions says of its length; `end_of_document` the token that ends a
    text, and so stands before the next one: it is what to begin with, too. UserError, with no folder written: no family
    expresses the settings, a value is not finite, or the disk refuses.
    """
    family = family_of(config)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_document)  # absent: the family's first model's
    with new_folder(folder) as unfinished:
        described = describe(family, config) | ends
        described |= {"architectures": [ARCHITECTURE[family]], "dtype": str(dtype).removeprefix("torch.")}
        if config.position == "rope":
            described["max_position_embeddings"] = context_length
        with _writing(folder):
            _write_json(unfinished / "config.json", described)
            _write_json(unfinished / "generation_config.json", ends)
            for name, content in others.items():
                (unfinished / name).write_bytes(content)
        _write_tensors(unfinished, folder, family, values, config, dtype, max_file_bytes)


def family_of(config: ModelConfig) -> str:
    """The family of transformers that computes exactly this model; a UserError if there is none."""
    others = {family: other_settings(family, config) for family in FAMILIES}
    for family, differences in others.items():
        if not differences:
            return family
    needs = "; ".join(
        f"{family} has " + ", ".join(f"model.{name}={_override(value)}" for name, value in sorted(differences.items()))
        for family, differences in others.items()
    )
    names = sorted({name for differences in others.values() for name in differences})
    value = {name: getattr(config, name) for name in names}
    remedy = "the checkpoints of the run stay usable here; to exchange a model, train it with one family's settings"
    raise UserError(Problem("model", value, f"no family that can be exported computes this model: {needs}", remedy))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to that becomes `folder` at the end, or vanishes if the body raises.

    UserError, before the body, where `folder` is a file or holds something.
    """
    final = folder.resolve()
    unfinished = final.with_name(f".{final.name}.{secrets.token_hex(4)}")
    require_new(folder)
    with _writing(folder):
        final.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir()
    try:
        yield unfinished
        with _writing(folder):
            for path in (*unfinished.rglob("*"), unfinished):
                _sync(path)
            unfinished.rename(final)
            _sync(final.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def require_new(folder: Path) -> None:
    """UserError where `folder` is a file or holds something."""
    with _writing(folder):
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UserError(
                Problem("folder", str(folder), "it exists already", "name a new folder, or delete this one")
            )


def bytes_of(size: str) -> int:
    """`5GB`, `200MiB` or a number of bytes, as transformers understands them; UserError for what is no size."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", size.strip())
    if found is None or found[2].upper() not in _UNITS or float(found[1]) == 0:
        raise UserError(Problem("max shard size", size, "is no size above 0", "5GB, 500MB or 2GiB, for example"))
    return int(float(found[1]) * _UNITS[found[2].upper()]) or 1


def file_plan(sizes: dict[str, int], limit: int) -> dict[str, list[str]]:
    """Files and their tensors, in order, for tensors of these bytes: a file holds `limit` bytes, or one tensor.

    Named as transformers names them: model.safetensors if one is enough, else model-00001-of-0000N.safetensors.
    """
    parts: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if parts[-1] and filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    if len(parts) == 1:
        return {f"{_NAME}.safetensors": parts[0]}
    count = len(parts)
    return {f"{_NAME}-{number:05}-of-{count:05}.safetensors": names for number, names in enumerate(parts, 1)}


def _write_tensors(
    unfinished: Path,
    folder: Path,
    family: str,
    values: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    dtype: torch.dtype,
    max_file_bytes: int,
) -> None:
    by_parameter = sources(family, config)
    ordered = [(record.name, by_parameter[record.name]) for record in gpt_parameters(config)]
    numels = {
        name_in_file(family, name): prod(shape) for _, source in ordered for name, shape in source.tensors.items()
    }
    plan = file_plan({name: numel * dtype.itemsize for name, numel in numels.items()}, max_file_bytes)
    tensors = _tensors(family, values, ordered, dtype)
    for file, names in plan.items():
        contents = dict(islice(tensors, len(names)))
        assert list(contents) == names, (file, names, list(contents))
        with _writing(folder):
            save_file(contents, unfinished / file, metadata={"format": "pt"})
            shutil.copymode(unfinished / "config.json", unfinished / file)  # safetensors lets only the owner read
        del contents  # before the next file's are read
    left = list(tensors)  # where the values end, those that are not finite are raised
    assert not left
    if len(plan) > 1:
        total = sum(numels.values())
        index = {
            "metadata": {"total_parameters": total, "total_size": total * dtype.itemsize},
            "weight_map": {name: file for file, names in plan.items() for name in names},
        }
        with _writing(folder):
            _write_json(unfinished / f"{_NAME}.safetensors.index.json", index)


def _tensors(
    family: str, values: Iterable[tuple[str, Tensor]], ordered: list[tuple[str, Source]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """(name in the file, its tensor) of each value; all values that are not finite in one UserError at the end."""
    problems = []
    for (name, value), (expected, source) in zip(values, ordered, strict=True):
        assert name == expected, (name, expected)
        for (part, shape), tensor in zip(source.tensors.items(), source.take_apart(value), strict=True):
            assert tuple(tensor.shape) == shape, (name, part, tensor.shape, shape)
            # A copy even where nothing changes: safetensors takes only contiguous tensors that share no memory.
            written = torch.empty(shape, dtype=dtype).copy_(tensor)
            if not torch.isfinite(written).all():
                remedy = "export a checkpoint from before training diverged, or to a dtype that reaches further"
                problems.append(Problem(name, NO_VALUE, f"holds numbers that are not finite as {dtype}", remedy))
            yield name_in_file(family, part), written
    if problems:
        raise UserError(problems)


def _override(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """A disk that refuses is the user's to know, not a traceback."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        remedy = "name a folder on a disk with room that this user may write to"
        raise UserError(Problem("folder", str(folder), f"it cannot be written: {reason}", remedy)) from error


def _sync(path: Path) -> None:
    """On disk when the call returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

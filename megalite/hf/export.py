"""A trained model as a folder that transformers loads: weights, config, tokenizer and model card.

What is written is a function of the parameters alone, so exports of equal parameters are equal files, whatever layout
trained them. The folder is complete or not there: it is written under another name beside its own, synced and renamed.
Tensors are taken one at a time; memory holds little more than one file of the export.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from jinja2 import Environment, StrictUndefined
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megalite.config.files import draft_of, refusing, sync_folder
from megalite.config.schema import ModelConfig
from megalite.config.settings import leaves, yaml_value
from megalite.errors.problems import NO_VALUE, Problem, UserError
from megalite.hf.families import FAMILIES
from megalite.hf.families.family import Family
from megalite.hf.saved_model import SavedModel, Source, sources
from megalite.launch.device import DTYPES
from megalite.model.flops import active_parameters, parameter_count
from megalite.train.history import read_metrics

CARD = Path(__file__).with_name("model_card.md")


def export_checkpoint(model: SavedModel, folder: Path, precision: str = "auto", max_shard_size: str = "5GB") -> int:
    """Write a run's masters, or their averages, rounded to `precision` (auto: that of the run), its tokenizer and a
    model card to `folder`. The result is the step of the checkpoint."""
    if model.state is None:
        rule = "it is a model of transformers already"
        raise UserError(Problem("model", str(model.folder), rule, "name the folder of a run"))
    tokenizer, length, step = model.tokenizer, model.config.train.seq_length, model.state.progress.step
    metrics: dict[str, Any] = {}  # the newest of every kind that the run had at this step
    for record in read_metrics(model.folder / "metrics.jsonl"):
        metrics |= record if record["step"] <= step else {}
    dtype = DTYPES[model.config.precision if precision == "auto" else precision]
    end = tokenizer.end_of_document if tokenizer else None
    others = {"README.md": model_card(model, metrics), **(tokenizer.files(length) if tokenizer else {})}
    export_model(model.values(), model.config.model, folder, dtype, length, end, others, max_shard_size)
    return step


def export_model(
    values: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    context_length: int,
    end_of_document: int | None = None,
    others: Mapping[str, bytes] = MappingProxyType({}),
    max_shard_size: str = "5GB",
) -> None:
    """Write `folder` (new or empty): the model and, by name, `others`. The inverse of `import_model`.

    `values` are (logical name, tensor of the logical shape on any device) in the order of `gpt_parameters(config)`,
    which is resolved (no None left); they are rounded to `dtype`. Rotary positions go up to `context_length`.
    """
    require_new(folder)
    family = family_of(config)
    by_parameter = sources(family, config)
    shapes = {name: shape for source in by_parameter.values() for name, shape in source.shapes.items()}
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    try:
        plan = split_torch_state_dict_into_shards(empty, max_shard_size=max_shard_size)
    except (ValueError, OverflowError) as error:
        raise UserError(Problem("max shard size", max_shard_size, str(error), "5GB or 500MB, for example")) from error
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_document)  # absent: the family's first model's
    settings = leaves(asdict(config)) | ({"max_positions": context_length} if config.position == "rope" else {})
    described = family.describe(settings) | ends | {"dtype": str(dtype).removeprefix("torch.")}
    texts: dict[str, Any] = {"config.json": described, "generation_config.json": ends}
    if plan.is_sharded:
        metadata = plan.metadata | {"total_parameters": sum(tensor.numel() for tensor in empty.values())}
        texts["model.safetensors.index.json"] = {"metadata": metadata, "weight_map": plan.tensor_to_filename}
    contents = {name: f"{json.dumps(text, indent=2, sort_keys=True)}\n".encode() for name, text in texts.items()}
    unfinished, parts = draft_of(folder.resolve()), defaultdict[str, dict[str, Tensor]](dict)
    try:
        unfinished.mkdir(parents=True)
        for name, content in {**contents, **others}.items():
            (unfinished / name).write_bytes(content)
        for name, tensor in _tensors(values, by_parameter, dtype):
            file = plan.tensor_to_filename[name]
            parts[file][name] = tensor
            if len(parts[file]) == len(plan.filename_to_tensors[file]):
                save_file(parts.pop(file), unfinished / file, metadata={"format": "pt"})
                shutil.copymode(unfinished / "config.json", unfinished / file)  # safetensors lets only the owner read
        for path in (*unfinished.iterdir(), unfinished):
            sync_folder(path)
        unfinished.rename(folder.resolve())
        sync_folder(unfinished.parent)
    except (OSError, SafetensorError) as error:
        remedy = "name a folder on a disk with room that this user may write to"
        raise UserError(Problem("folder", str(folder), f"it cannot be written: {error}", remedy)) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _tensors(
    values: Iterable[tuple[str, Tensor]], by_parameter: Mapping[str, Source], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """(name in the file, its tensor) of each value; UserError at the first that is not finite.

    No value is kept when the next is asked for: the experts of a layer may be all that fits into memory.
    """
    each = iter(values)
    for expected, source in by_parameter.items():
        name, value = next(each)
        assert name == expected, (name, expected)
        for part, tensor in source.split(value).items():
            # A copy even where nothing changes: safetensors takes only contiguous tensors that share no memory.
            written = torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
            if not torch.isfinite(written).all():
                remedy = "export a checkpoint from before training diverged, or to a dtype that reaches further"
                raise UserError(Problem(name, NO_VALUE, f"holds numbers that are not finite as {dtype}", remedy))
            yield part, written
        del value, tensor


def family_of(config: ModelConfig) -> Family:
    """The family of transformers that computes exactly this model; a UserError if there is none."""
    needs = []
    for family in FAMILIES.values():
        if family.has_experts == (config.moe.num_experts > 0):
            if not (others := family.other_settings(leaves(asdict(config)))):
                return family
            shown = ", ".join(f"model.{name}={yaml_value(value)}" for name, value in sorted(others.items()))
            needs.append(f"{family.model_type} has {shown}")
    rule = f"no family that can be exported computes this model: {'; '.join(needs)}"
    remedy = "train with one family's settings; as it is, megalite evaluate and megalite generate take the run"
    raise UserError(Problem("model", config.name, rule, remedy))


def require_new(folder: Path) -> None:
    """UserError where `folder` is a file or holds something."""
    with refusing(folder, "name a folder that this user may write to"):
        if folder.is_file() or (folder.exists() and any(folder.iterdir())):
            rule, remedy = "it exists already", "name a new folder, or delete this one"
            raise UserError(Problem("folder", str(folder), rule, remedy))


def model_card(model: SavedModel, metrics: Mapping[str, Any]) -> bytes:
    """The README.md of an export, a function of the settings, the data and `metrics` (as in metrics.jsonl) alone:
    layout, device, time and the paths of a machine are left out, so runs that trained the same have the same card."""
    config, data, begun, state = model.config, model.config.data, model.config.checkpoint.init_from, model.state
    assert state is not None
    paths = data.path if isinstance(data.path, list) else [data.path or ""]
    names = [*paths, data.subset, data.split] if data.source == "hf" else [Path(path).name for path in paths]
    page = Environment(undefined=StrictUndefined, trim_blocks=True, finalize=in_a_table, keep_trailing_newline=True)
    card = page.from_string(CARD.read_text(encoding="utf-8")).render(
        vars(config),
        progress=state.progress,
        ema=model.ema,
        has_tokenizer=model.tokenizer_folder is not None,
        family=family_of(config.model),
        parameters=parameter_count(config.model),
        active=active_parameters(config.model),
        text="; ".join(filter(None, [", ".join(filter(None, names)), state.data["description"]])),
        start=f"the weights of {Path(begun).name}" if begun else f"seed {config.seed}",
        metrics={name: value for name, value in metrics.items() if value is not None},
    )
    return card.encode()


def in_a_table(value: Any) -> str:
    """A number with its thousands marked, a text as one cell of a row."""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return " ".join(text.replace("|", "&#124;").replace("<", "&lt;").split())

"""Weights of a transformers folder (hf/families/) as logical parameters. Reads config.json and safetensors only.

No model of transformers is built, nothing is downloaded and nothing is unpickled. What does not fit (another shape,
missing or unexpected tensors) is refused, all of it in one message. A dense file also makes a model with experts: the
MLP is every expert, and there are no routers (arXiv 2212.05055).
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.config.files import read_object
from megalite.config.model_folder import (
    SETTING,
    folder_problem,
    imported_model_settings,
    read_model_file,
    settings_of,
)
from megalite.config.schema import ModelConfig
from megalite.config.settings import yaml_value
from megalite.errors.problems import Problem, UserError, refuse
from megalite.hf.families import FAMILIES
from megalite.hf.families.family import Family, differences
from megalite.model.parameters import gpt_parameters, padded_vocabulary

HEAD = "lm_head.weight"
FLOATING = ("F64", "F32", "F16", "BF16")
NOT_WEIGHTS = re.compile(r"attn\.(masked_)?bias$|rotary_emb\.inv_freq$")  # buffers that older versions saved
MOST_NAMED = 20  # tensors that do not fit

Stored = dict[str, tuple[Any, str]]  # by name in `sources`: the open file, and the tensor's name there


class Form(NamedTuple):
    """How tensors of the file become a parameter, and the other way: inverse to each other to the bit. `split` gives
    views where it can. `tensors` are those of one parameter, by name with their shapes."""

    join: Callable[..., Tensor]
    split: Callable[[Tensor], tuple[Tensor, ...]]
    tensors: Mapping[str, tuple[int, ...]] = {}


SAME = Form(lambda tensor: tensor, lambda value: (value,))
TRANSPOSED = Form(torch.t, lambda value: (value.t(),))  # GPT-2's Conv1D keeps weights as [in, out]
STACKED = Form(lambda *parts: torch.stack(parts), torch.unbind)  # two of [ffn, ...] <-> [2, ffn, ...]
PAIRS = Form(lambda *parts: torch.stack(parts).unflatten(0, (-1, 2)), lambda value: value.flatten(0, 1).unbind())


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
        setting, rule = f"model.{name}", f"is {value} in the model of {folder}"
        problems.append(Problem(setting, attrgetter(name)(config), rule, f"{setting}={yaml_value(value)}"))
    refuse(problems)
    stored, wanted = _stored_tensors(folder, family.prefix), sources(family, config)
    refuse([*_misfits(folder, stored, wanted, ignored={HEAD} if config.tie_embeddings else set())][:MOST_NAMED])
    if config.tie_embeddings and HEAD in stored:  # transformers uses it, whatever config.json says
        [own, head] = (_tensor(folder, stored, name) for name in [*wanted["embedding.word.weight"].tensors, HEAD])
        if not torch.equal(own, head):
            rule = f"tie_word_embeddings=true, and {HEAD} is another matrix than the embedding"
            raise UserError(Problem(SETTING, str(folder), rule, "tie_word_embeddings=false in its config.json"))
    return (
        (name, source.join(*(_tensor(folder, stored, part) for part in source.tensors)))
        for name, source in wanted.items()
        if names is None or name in names
    )


def sources(family: Family, config: ModelConfig) -> dict[str, Form]:
    """The tensors and forms by logical name, in the order of `gpt_parameters`. `config` is resolved (no None left)."""
    forms, found = _forms(family, config), {}
    for record in gpt_parameters(config):
        layer = "".join(re.findall(r"\.(\d+)\.", record.name))
        module, _, kind = re.sub(r"\.\d+\.", ".N.", record.name).rpartition(".")
        modules = family.modules.get(module, ())
        if record.precision == "master" and not modules:
            continue  # a router, of a dense file
        form = forms.get(f"{module}.{kind}", SAME)
        names = [
            f"{family.prefix}{name.replace('N', layer).replace('E', str(expert))}.{kind}"
            for expert in range(config.moe.num_experts if any("E" in name for name in modules) else 1)
            for name in modules
        ] or [HEAD]
        parts = form.split(torch.empty(record.shape, device="meta"))
        shapes = {name: tuple(part.shape) for name, part in zip(names, parts, strict=True)}
        found[record.name] = form._replace(tensors=shapes)
    return found


def _forms(family: Family, config: ModelConfig) -> dict[str, Form]:
    """The forms of all parameters that are not the same in the file."""
    heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_size
    rows, experts, qkv, block = config.vocab_size, config.moe.num_experts, "blocks.N.attention.qkv", "blocks.N"
    padding = padded_vocabulary(config) - rows
    # Tables in the file end with the vocabulary; the rows that round ours up are zero.
    vocabulary = Form(lambda table: F.pad(table, (0, 0, 0, padding)), lambda value: (value[:rows],))
    forms = {"embedding.word.weight": vocabulary, "head.weight": vocabulary}
    if family.conv1d:
        by_head = Form(  # all queries, all keys, all values: [3 * heads * d, ...] <-> [heads, 3, d, ...]
            lambda fused: fused.unflatten(0, (3, heads, d)).transpose(0, 1),
            lambda value: (value.transpose(0, 1).flatten(0, 2),),
        )
        forms |= {f"{block}.{name}.weight": TRANSPOSED for name in ("attention.out", "mlp.up", "mlp.down")}
        weight = Form(lambda fused: by_head.join(fused.t()), lambda value: (by_head.split(value)[0].t(),))
        return forms | {f"{qkv}.weight": weight, f"{qkv}.bias": by_head}
    grouped = Form(  # queries [heads * d, ...], keys and values [groups * d, ...] <-> [groups, heads of it + 2, d, ...]
        lambda *parts: torch.cat([part.unflatten(0, (groups, -1, d)) for part in parts], dim=1),
        lambda value: tuple(part.flatten(0, 2) for part in value.split((value.shape[1] - 2, 1, 1), dim=1)),
    )
    for kind in ("weight", "bias"):
        forms |= {f"{qkv}.{kind}": grouped, f"{block}.mlp.gate_up.{kind}": STACKED}
    down, gate_up = STACKED, PAIRS  # one, or two, of each expert, one expert after the other
    if not family.has_experts:  # one [h, ffn] for each expert, or two of [ffn, h] -> [experts, 2, ffn, h]
        down = Form(lambda part: part.expand(experts, *part.shape), lambda value: (value[0],))
        gate_up = Form(
            lambda *parts: torch.stack(parts).expand(experts, 2, *parts[0].shape), lambda value: value[0].unbind()
        )
    return forms | {f"{block}.moe.experts.down.weight": down, f"{block}.moe.experts.gate_up.weight": gate_up}


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


def _misfits(folder: Path, stored: Stored, wanted: dict[str, Form], ignored: set[str]) -> Iterator[Problem]:
    """Every tensor that is missing, unexpected, or of another shape or kind."""
    shapes = {name: shape for source in wanted.values() for name, shape in source.tensors.items()}
    for name, shape in shapes.items():
        header = stored[name][0].get_slice(stored[name][1]) if name in stored else None
        if header is None or tuple(header.get_shape()) != shape or header.get_dtype() not in FLOATING:
            yield folder_problem(folder, f"must have {name} of the shape {[*shape]}, in one of {', '.join(FLOATING)}")
    for name in stored.keys() - shapes.keys() - ignored:
        if not NOT_WEIGHTS.search(name):
            yield folder_problem(folder, f"must have no tensors but the model's own, and holds {name}")


def _tensor(folder: Path, stored: Stored, name: str) -> Tensor:
    file, full_name = stored[name]
    tensor: Tensor = file.get_tensor(full_name)
    if not torch.isfinite(tensor).all():
        raise UserError(folder_problem(folder, f"must hold finite numbers, unlike {full_name}"))
    return tensor

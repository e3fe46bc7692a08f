"""Which tensors of transformers' models each logical parameter consists of, read both ways.

A family's `modules` name the modules of the file whose tensors make up a logical module. A form says how: it joins the
tensors of the file into the parameter, and splits the parameter into them. A dense file also makes a model with
experts: the MLP is every expert, and there are no routers (arXiv 2212.05055).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.schema import ModelConfig
from megalite.hf.families.family import Family
from megalite.model.parameters import gpt_parameters, padded_vocabulary

HEAD = "lm_head.weight"


class Form(NamedTuple):
    """Two functions that are inverse to each other to the bit. `split` gives views where it can."""

    join: Callable[..., Tensor]
    split: Callable[[Tensor], tuple[Tensor, ...]]


_SAME = Form(lambda tensor: tensor, lambda value: (value,))
_TRANSPOSED = Form(torch.t, lambda value: (value.t(),))  # GPT-2's Conv1D keeps weights as [in, out]
_STACKED = Form(lambda *parts: torch.stack(parts), torch.unbind)  # two of [ffn, ...] <-> [2, ffn, ...]
_PAIRS = Form(lambda *parts: torch.stack(parts).unflatten(0, (-1, 2)), lambda value: value.flatten(0, 1).unbind())


@dataclass(frozen=True)
class Source:
    """What one logical parameter consists of: tensors of the file, by name with their shapes, and the form."""

    tensors: dict[str, tuple[int, ...]]
    form: Form


def sources(family: Family, config: ModelConfig) -> dict[str, Source]:
    """The sources by logical name, in the order of `gpt_parameters`. `config` is resolved (no None left)."""
    modules, forms, found = family.modules, _forms(family, config), {}
    for record in gpt_parameters(config):
        layer = "".join(re.findall(r"\.(\d+)\.", record.name))
        module, _, kind = re.sub(r"\.\d+\.", ".N.", record.name).rpartition(".")
        if record.precision == "master" and module not in modules:
            continue
        form = forms.get(f"{module}.{kind}", _SAME)
        experts = config.moe.num_experts if any("E" in name for name in modules.get(module, [])) else 1
        names = [
            f"{family.prefix}{name.replace('N', layer).replace('E', str(expert))}.{kind}"
            for expert in range(experts)
            for name in modules.get(module, [])
        ] or [HEAD]
        parts = form.split(torch.empty(record.shape, device="meta"))
        found[record.name] = Source({name: tuple(part.shape) for name, part in zip(names, parts, strict=True)}, form)
    return found


def _forms(family: Family, config: ModelConfig) -> dict[str, Form]:
    """The forms of all parameters that are not the same in the file."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    d, rows = config.head_size, config.vocab_size
    padding = padded_vocabulary(config) - rows

    def per_head(fused: Tensor) -> Tensor:
        """GPT-2's all queries, all keys, all values: [3 * heads * d, ...] -> [heads, 3, d, ...]"""
        by_head: Tensor = fused.unflatten(0, (3, heads, d)).transpose(0, 1)
        return by_head

    def per_part(value: Tensor) -> Tensor:
        return value.transpose(0, 1).flatten(0, 2)

    def grouped(*parts: Tensor) -> Tensor:
        """Queries [heads * d, ...], keys and values [groups * d, ...] -> [groups, heads of it + 2, d, ...]"""
        return torch.cat([part.unflatten(0, (groups, -1, d)) for part in parts], dim=1)

    def ungrouped(value: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.flatten(0, 2) for part in value.split((value.shape[1] - 2, 1, 1), dim=1))

    def copied_to_experts(*parts: Tensor) -> Tensor:
        """One [h, ffn] to each expert, or two of [ffn, h] -> [experts, 2, ffn, h]"""
        value = parts[0] if len(parts) == 1 else torch.stack(parts)
        return value.expand(config.moe.num_experts, *value.shape)

    # Tables in the file end with the vocabulary; the rows that round ours up are zero.
    vocabulary = Form(lambda table: F.pad(table, (0, 0, 0, padding)), lambda value: (value[:rows],))
    forms = {"embedding.word.weight": vocabulary, "head.weight": vocabulary}
    qkv, block = "blocks.N.attention.qkv", "blocks.N"
    if family.conv1d:
        forms |= {f"{block}.{name}.weight": _TRANSPOSED for name in ("attention.out", "mlp.up", "mlp.down")}
        forms[f"{qkv}.weight"] = Form(lambda fused: per_head(fused.t()), lambda value: (per_part(value).t(),))
        forms[f"{qkv}.bias"] = Form(per_head, lambda value: (per_part(value),))
        return forms
    for kind in ("weight", "bias"):
        forms |= {f"{qkv}.{kind}": Form(grouped, ungrouped), f"{block}.mlp.gate_up.{kind}": _STACKED}
    down, gate_up = _STACKED, _PAIRS  # one, or two, of each expert, one expert after the other
    if not family.has_experts:
        down = Form(copied_to_experts, lambda value: (value[0],))
        gate_up = Form(copied_to_experts, lambda value: value[0].unbind())
    return forms | {f"{block}.moe.experts.down.weight": down, f"{block}.moe.experts.gate_up.weight": gate_up}

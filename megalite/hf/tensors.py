"""Which tensors of transformers' models each logical parameter consists of: a table, read both ways.

A row of the table is a module: its logical name, and the names of the modules in the file whose tensors it consists of
(N: the layer, E: each of its experts). A form says how: it joins the tensors of the file into the parameter, and splits
the parameter into them. A dense model of a file is one with experts, too: its MLP is each of them, and routers it has
none (arXiv 2212.05055).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.families import FAMILIES, OF_EXPERTS
from megalite.config.schema import ModelConfig
from megalite.model.parameters import gpt_parameters, padded_vocabulary

HEAD = "lm_head.weight"
PREFIX = dict.fromkeys(FAMILIES, "model.") | {"gpt2": "transformer."}  # of all tensors but the head

_GPT2 = {
    "embedding.word": ["wte"],
    "embedding.position": ["wpe"],
    "blocks.N.attention_norm": ["h.N.ln_1"],
    "blocks.N.attention.qkv": ["h.N.attn.c_attn"],
    "blocks.N.attention.out": ["h.N.attn.c_proj"],
    "blocks.N.mlp_norm": ["h.N.ln_2"],
    "blocks.N.mlp.up": ["h.N.mlp.c_fc"],
    "blocks.N.mlp.down": ["h.N.mlp.c_proj"],
    "final_norm": ["ln_f"],
}
_LLAMA = {
    "embedding.word": ["embed_tokens"],
    "blocks.N.attention_norm": ["layers.N.input_layernorm"],
    "blocks.N.attention.qkv": [f"layers.N.self_attn.{name}_proj" for name in "qkv"],
    "blocks.N.attention.query_norm": ["layers.N.self_attn.q_norm"],
    "blocks.N.attention.key_norm": ["layers.N.self_attn.k_norm"],
    "blocks.N.attention.out": ["layers.N.self_attn.o_proj"],
    "blocks.N.mlp_norm": ["layers.N.post_attention_layernorm"],
    "blocks.N.mlp.gate_up": ["layers.N.mlp.gate_proj", "layers.N.mlp.up_proj"],
    "blocks.N.mlp.down": ["layers.N.mlp.down_proj"],
    "final_norm": ["norm"],
    "blocks.N.moe.experts.gate_up": ["layers.N.mlp.gate_proj", "layers.N.mlp.up_proj"],
    "blocks.N.moe.experts.down": ["layers.N.mlp.down_proj"],
}
_MIXTRAL = _LLAMA | {
    "blocks.N.moe.router": ["layers.N.block_sparse_moe.gate"],
    "blocks.N.moe.experts.gate_up": [f"layers.N.block_sparse_moe.experts.E.{name}" for name in ("w1", "w3")],
    "blocks.N.moe.experts.down": ["layers.N.block_sparse_moe.experts.E.w2"],
}
_QWEN3_MOE = _LLAMA | {
    "blocks.N.moe.router": ["layers.N.mlp.gate"],
    "blocks.N.moe.experts.gate_up": [f"layers.N.mlp.experts.E.{name}_proj" for name in ("gate", "up")],
    "blocks.N.moe.experts.down": ["layers.N.mlp.experts.E.down_proj"],
}
_MODULES = {"gpt2": _GPT2, "llama": _LLAMA, "qwen3": _LLAMA, "mixtral": _MIXTRAL, "qwen3_moe": _QWEN3_MOE}


class Form(NamedTuple):
    """Two functions that are inverse to each other to the bit. `split` gives views where it can."""

    join: Callable[..., Tensor]
    split: Callable[[Tensor], tuple[Tensor, ...]]


_SAME = Form(lambda tensor: tensor, lambda value: (value,))
_TRANSPOSED = Form(torch.t, lambda value: (value.t(),))  # GPT-2's Conv1D keeps weights as [in, out]
_STACKED = Form(lambda *parts: torch.stack(parts), torch.unbind)  # two of [ffn, ...] <-> [2, ffn, ...]
_EXPERTS = {  # of each expert one, or two, one after the other
    "down": _STACKED,
    "gate_up": Form(
        lambda *parts: torch.stack(parts).unflatten(0, (-1, 2)), lambda value: value.flatten(0, 1).unbind()
    ),
}


@dataclass(frozen=True)
class Source:
    """What one logical parameter consists of: tensors of the file, by name with their shapes, and the form."""

    tensors: dict[str, tuple[int, ...]]
    form: Form


def sources(family: str, config: ModelConfig) -> dict[str, Source]:
    """By logical name, in the order of `gpt_parameters`. `config` is resolved (no None left)."""
    modules, forms = _MODULES[family], _forms(family, config)
    found = {}
    for record in gpt_parameters(config):
        layer = "".join(re.findall(r"\.(\d+)\.", record.name))
        module, _, kind = re.sub(r"\.\d+\.", ".N.", record.name).rpartition(".")
        if record.precision == "master" and module not in modules:
            continue
        form = forms.get(f"{module}.{kind}", _SAME)
        experts = config.moe.num_experts if any("E" in name for name in modules.get(module, [])) else 1
        names = [
            f"{PREFIX[family]}{name.replace('N', layer).replace('E', str(expert))}.{kind}"
            for expert in range(experts)
            for name in modules.get(module, [])
        ] or [HEAD]
        parts = form.split(torch.empty(record.shape, device="meta"))
        found[record.name] = Source({name: tuple(part.shape) for name, part in zip(names, parts, strict=True)}, form)
    return found


def _forms(family: str, config: ModelConfig) -> dict[str, Form]:
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

    copied = {
        "down": Form(copied_to_experts, lambda value: (value[0],)),
        "gate_up": Form(copied_to_experts, lambda value: value[0].unbind()),
    }
    # Tables in the file end with the vocabulary; the rows that round ours up are zero.
    vocabulary = Form(lambda table: F.pad(table, (0, 0, 0, padding)), lambda value: (value[:rows],))
    forms = {"embedding.word.weight": vocabulary, "head.weight": vocabulary}
    qkv, block = "blocks.N.attention.qkv", "blocks.N"
    if family == "gpt2":
        forms |= {f"{block}.{name}.weight": _TRANSPOSED for name in ("attention.out", "mlp.up", "mlp.down")}
        forms[f"{qkv}.weight"] = Form(lambda fused: per_head(fused.t()), lambda value: (per_part(value).t(),))
        forms[f"{qkv}.bias"] = Form(per_head, lambda value: (per_part(value),))
        return forms
    for kind in ("weight", "bias"):
        forms |= {f"{qkv}.{kind}": Form(grouped, ungrouped), f"{block}.mlp.gate_up.{kind}": _STACKED}
    of_experts = _EXPERTS if family in OF_EXPERTS else copied
    return forms | {f"{block}.moe.experts.{matrix}.weight": form for matrix, form in of_experts.items()}

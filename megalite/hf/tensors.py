"""Which tensors of transformers' GPT-2, Llama and Qwen3 each logical parameter is assembled from and taken apart into.

The map is data and serves both ways: names and shapes as they are in the file, and two functions inverse to each other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.schema import ModelConfig
from megalite.model.parameters import padded_vocabulary

PREFIX = {"gpt2": "transformer.", "llama": "model.", "qwen3": "model."}  # of all tensors but the head
HEAD = "lm_head.weight"

Forms = tuple[Callable[..., Tensor], Callable[[Tensor], tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Source:
    """Where one logical parameter comes from: names (without the family's prefix) and shapes of tensors in the file.

    `assemble` makes the parameter of them; `take_apart`, its inverse to the bit, makes them of the parameter, as views
    where it can.
    """

    tensors: Mapping[str, tuple[int, ...]]
    assemble: Callable[..., Tensor]
    take_apart: Callable[[Tensor], tuple[Tensor, ...]]


def sources(family: str, config: ModelConfig) -> dict[str, Source]:
    """For every logical parameter of the model, what it is assembled from. `config` is resolved (no None left)."""
    return _gpt2_sources(config) if family == "gpt2" else _llama_sources(config)


def name_in_file(family: str, name: str) -> str:
    """The whole name of a tensor of `sources`."""
    return name if name == HEAD else PREFIX[family] + name


def _gpt2_sources(config: ModelConfig) -> dict[str, Source]:
    """GPT-2's Conv1D keeps weights as [in, out]; c_attn is all queries, all keys, all values."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    d, ffn, positions = config.head_size, config.ffn_hidden_size, config.max_positions
    assert d is not None
    assert ffn is not None
    assert positions is not None

    def per_head(fused: Tensor) -> Tensor:
        per_part: Tensor = fused.unflatten(0, (3, heads, d))  # [3 * heads * d, ...] -> [3, heads, d, ...]
        return per_part.transpose(0, 1)

    def per_part(value: Tensor) -> Tensor:
        return value.transpose(0, 1).flatten(0, 2)  # [heads, 3, d, ...] -> [3 * heads * d, ...]

    found = _vocabulary_sources(config, "wte.weight")
    found["embedding.position.weight"] = _same("wpe.weight", positions, hidden)
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}", f"h.{layer}"
        for part, name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            found |= _norm_sources(f"{ours}.{part}", f"{theirs}.{name}", hidden)
        found[f"{ours}.attention.qkv.weight"] = Source(
            {f"{theirs}.attn.c_attn.weight": (hidden, 3 * hidden)},
            lambda fused: per_head(fused.t()),
            lambda value: (per_part(value).t(),),
        )
        found[f"{ours}.attention.qkv.bias"] = Source(
            {f"{theirs}.attn.c_attn.bias": (3 * hidden,)}, per_head, lambda value: (per_part(value),)
        )
        for part, name, inputs, outputs in (
            ("attention.out", "attn.c_proj", hidden, hidden),
            ("mlp.up", "mlp.c_fc", hidden, ffn),
            ("mlp.down", "mlp.c_proj", ffn, hidden),
        ):
            weight = {f"{theirs}.{name}.weight": (inputs, outputs)}
            found[f"{ours}.{part}.weight"] = Source(weight, torch.t, lambda value: (value.t(),))
            found[f"{ours}.{part}.bias"] = _same(f"{theirs}.{name}.bias", outputs)
    return found | _norm_sources("final_norm", "ln_f", hidden)


def _llama_sources(config: ModelConfig) -> dict[str, Source]:
    hidden, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    d, ffn = config.head_size, config.ffn_hidden_size
    assert d is not None
    assert ffn is not None
    assert groups is not None
    grouped, stacked = _grouped(groups, d), (_stack, torch.unbind)

    found = _vocabulary_sources(config, "embed_tokens.weight")
    kinds: list[tuple[str, tuple[int, ...]]] = [("weight", (hidden,)), *([("bias", ())] if config.bias else [])]
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}", f"layers.{layer}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        found[f"{ours}.attention_norm.weight"] = _same(f"{theirs}.input_layernorm.weight", hidden)
        found[f"{ours}.mlp_norm.weight"] = _same(f"{theirs}.post_attention_layernorm.weight", hidden)
        if config.qk_norm:
            found[f"{ours}.attention.query_norm.weight"] = _same(f"{attention}.q_norm.weight", d)
            found[f"{ours}.attention.key_norm.weight"] = _same(f"{attention}.k_norm.weight", d)
        for kind, inputs in kinds:
            widths = {"q": heads * d, "k": groups * d, "v": groups * d}
            found[f"{ours}.attention.qkv.{kind}"] = Source(
                {f"{attention}.{part}_proj.{kind}": (width, *inputs) for part, width in widths.items()}, *grouped
            )
            found[f"{ours}.mlp.gate_up.{kind}"] = Source(
                {f"{mlp}.{part}_proj.{kind}": (ffn, *inputs) for part in ("gate", "up")}, *stacked
            )
        for part, name, width in (
            ("attention.out", f"{attention}.o_proj", heads * d),
            ("mlp.down", f"{mlp}.down_proj", ffn),
        ):
            found[f"{ours}.{part}.weight"] = _same(f"{name}.weight", hidden, width)
            if config.bias:
                found[f"{ours}.{part}.bias"] = _same(f"{name}.bias", hidden)
    found["final_norm.weight"] = _same("norm.weight", hidden)
    return found


def _grouped(groups: int, d: int) -> Forms:
    """Queries [heads * d, ...], keys and values [groups * d, ...] <-> [groups, heads of it + 2, d, ...]."""

    def assemble(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([part.unflatten(0, (groups, -1, d)) for part in (query, key, value)], dim=1)

    def take_apart(value: Tensor) -> tuple[Tensor, ...]:
        queries = value.shape[1] - 2
        return tuple(part.flatten(0, 2) for part in value.split((queries, 1, 1), dim=1))

    return assemble, take_apart


def _stack(*parts: Tensor) -> Tensor:
    """Gate and up [ffn, ...] -> [2, ffn, ...]"""
    return torch.stack(parts)


def _vocabulary_sources(config: ModelConfig, embedding: str) -> dict[str, Source]:
    """Their tables end with the vocabulary; the rows that round ours up are zero."""
    assert config.vocab_size is not None
    rows, shape = config.vocab_size, (config.vocab_size, config.hidden_size)
    padding = padded_vocabulary(config) - rows

    def padded(table: Tensor) -> Tensor:
        return F.pad(table, (0, 0, 0, padding)) if padding else table

    forms: Forms = (padded, lambda value: (value[:rows],))
    found = {"embedding.word.weight": Source({embedding: shape}, *forms)}
    if not config.tie_embeddings:
        found["head.weight"] = Source({HEAD: shape}, *forms)
    return found


def _norm_sources(ours: str, theirs: str, hidden: int) -> dict[str, Source]:
    return {f"{ours}.{kind}": _same(f"{theirs}.{kind}", hidden) for kind in ("weight", "bias")}


def _same(name: str, *shape: int) -> Source:
    return Source({name: shape}, lambda tensor: tensor, lambda tensor: (tensor,))

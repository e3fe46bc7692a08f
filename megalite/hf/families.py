"""How transformers' GPT-2, Llama and Qwen3 map to the one GPT: config.json to settings, tensors to parameters.

Both maps are data: a dictionary of `model.*` settings, and for each logical parameter the tensors of the file that it
is assembled from, with the shapes they must have.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.config.schema import ModelConfig

FAMILIES = ("gpt2", "llama", "qwen3")  # model_type in config.json
GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu"}
DROPPED_PREFIX = {"gpt2": "transformer.", "llama": "model.", "qwen3": "model."}


class UnsupportedError(Exception):
    """The folder's model does something that the GPT here has no setting for: (key of config.json, value, rule)."""


@dataclass(frozen=True)
class Source:
    """Where one logical parameter comes from: names (without the family's prefix) and shapes of tensors in the file."""

    tensors: dict[str, tuple[int, ...]]
    assemble: Callable[..., Tensor]


def model_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    """The `model.*` settings that a config.json amounts to.

    KeyError where a size is missing, UnsupportedError where no setting describes the model.
    """
    if found["model_type"] == "gpt2":
        return _gpt2_settings(found)
    return _llama_settings(found)


def sources(family: str, config: ModelConfig) -> dict[str, Source]:
    """For every logical parameter of the model, what it is assembled from."""
    return _gpt2_sources(config) if family == "gpt2" else _llama_sources(config)


def _gpt2_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    _require(found, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    hidden, heads = found["n_embd"], found["n_head"]
    activation = found.get("activation_function", "gelu_new")
    if activation not in GELU:
        raise UnsupportedError("activation_function", activation, f"is one of {', '.join(GELU)}")
    return {
        "num_layers": found["n_layer"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_size": hidden // heads,
        "ffn_hidden_size": found.get("n_inner") or 4 * hidden,
        "vocab_size": found["vocab_size"],
        "position": "learned",
        "max_positions": found["n_positions"],
        "norm": "layernorm",
        "norm_eps": found.get("layer_norm_epsilon", 1e-5),
        "activation": GELU[activation],
        "bias": True,
        "qk_norm": False,
        "tie_embeddings": found.get("tie_word_embeddings", True),
    }


def _llama_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    """Llama, and Qwen3, which adds norms over queries and keys."""
    is_qwen = found["model_type"] == "qwen3"
    bias = found.get("attention_bias", False)
    _require(found, hidden_act="silu", use_sliding_window=False, mlp_bias=bias)
    if is_qwen and bias:
        raise UnsupportedError(
            "attention_bias", bias, "is false: Qwen3 has biases in attention but not in its MLP then"
        )
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    settings = {
        "num_layers": found["num_hidden_layers"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": found.get("num_key_value_heads") or heads,
        "head_size": found.get("head_dim") or (128 if is_qwen else hidden // heads),
        "ffn_hidden_size": found["intermediate_size"],
        "vocab_size": found["vocab_size"],
        "position": "rope",
        "norm": "rmsnorm",
        "norm_eps": found.get("rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "bias": bias,
        "qk_norm": is_qwen,
        "tie_embeddings": found.get("tie_word_embeddings", False),
    }
    return settings | _rope_settings(found)


def _rope_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of transformers 5; before, `rope_theta` beside `rope_scaling`."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnsupportedError("rope_type", kind, "is default or llama3")
    _require(rope, partial_rotary_factor=1.0)
    theta = rope.get("rope_theta", found.get("rope_theta", 10000.0))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling_factor": 1.0}
    return {
        "rope_theta": theta,
        "rope_scaling_factor": rope["factor"],
        "rope_low_frequency_factor": rope["low_freq_factor"],
        "rope_high_frequency_factor": rope["high_freq_factor"],
        "rope_original_positions": rope["original_max_position_embeddings"],
    }


def _require(found: Mapping[str, Any], **needed: Any) -> None:
    """Refuse values of keys for which the GPT here knows only one; an absent key has that one."""
    for key, value in needed.items():
        if found.get(key, value) != value:
            raise UnsupportedError(key, found[key], f"is {value}")


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

    found = _vocabulary_sources(config, "wte.weight")
    found["embedding.position.weight"] = _same("wpe.weight", positions, hidden)
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}", f"h.{layer}"
        for part, name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            found |= _norm_sources(f"{ours}.{part}", f"{theirs}.{name}", hidden)
        found[f"{ours}.attention.qkv.weight"] = Source(
            {f"{theirs}.attn.c_attn.weight": (hidden, 3 * hidden)}, lambda fused: per_head(fused.t())
        )
        found[f"{ours}.attention.qkv.bias"] = Source({f"{theirs}.attn.c_attn.bias": (3 * hidden,)}, per_head)
        for part, name, inputs, outputs in (
            ("attention.out", "attn.c_proj", hidden, hidden),
            ("mlp.up", "mlp.c_fc", hidden, ffn),
            ("mlp.down", "mlp.c_proj", ffn, hidden),
        ):
            found[f"{ours}.{part}.weight"] = Source({f"{theirs}.{name}.weight": (inputs, outputs)}, torch.t)
            found[f"{ours}.{part}.bias"] = _same(f"{theirs}.{name}.bias", outputs)
    return found | _norm_sources("final_norm", "ln_f", hidden)


def _llama_sources(config: ModelConfig) -> dict[str, Source]:
    hidden, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    d, ffn = config.head_size, config.ffn_hidden_size
    assert d is not None
    assert ffn is not None
    assert groups is not None

    def grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = (part.unflatten(0, (groups, -1, d)) for part in (query, key, value))  # [groups, heads of it, d, ...]
        return torch.cat(tuple(parts), dim=1)

    def stacked(gate: Tensor, up: Tensor) -> Tensor:
        return torch.stack((gate, up))  # [2, ffn, ...]

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
                {f"{attention}.{part}_proj.{kind}": (width, *inputs) for part, width in widths.items()}, grouped
            )
            found[f"{ours}.mlp.gate_up.{kind}"] = Source(
                {f"{mlp}.{part}_proj.{kind}": (ffn, *inputs) for part in ("gate", "up")}, stacked
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


def _vocabulary_sources(config: ModelConfig, embedding: str) -> dict[str, Source]:
    assert config.vocab_size is not None
    found = {"embedding.word.weight": _same(embedding, config.vocab_size, config.hidden_size)}
    if not config.tie_embeddings:
        found["head.weight"] = _same("lm_head.weight", config.vocab_size, config.hidden_size)
    return found


def _norm_sources(ours: str, theirs: str, hidden: int) -> dict[str, Source]:
    return {f"{ours}.{kind}": _same(f"{theirs}.{kind}", hidden) for kind in ("weight", "bias")}


def _same(name: str, *shape: int) -> Source:
    return Source({name: shape}, lambda tensor: tensor)

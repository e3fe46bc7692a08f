"""How config.json of transformers' GPT-2, Llama and Qwen3 and the settings of the one GPT say the same.

The map is data and serves both ways: which key of config.json is which `model.*` setting, and what the family fixes.
"""

from collections.abc import Mapping
from typing import Any

from megalite.config.schema import ModelConfig

FAMILIES = ("gpt2", "llama", "qwen3")  # model_type in config.json
ARCHITECTURE = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu"}

_GPT2_KEYS = {  # setting: key of config.json
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "ffn_hidden_size": "n_inner",
    "vocab_size": "vocab_size",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "tie_embeddings": "tie_word_embeddings",
}
_LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "bias": "attention_bias",
    "tie_embeddings": "tie_word_embeddings",
}
_LLAMA3_ROPE_KEYS = {
    "rope_scaling_factor": "factor",
    "rope_low_frequency_factor": "low_freq_factor",
    "rope_high_frequency_factor": "high_freq_factor",
    "rope_original_positions": "original_max_position_embeddings",
}
_GPT2_ABSENT = {  # what transformers takes for keys that config.json lacks
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "activation_function": "gelu_new",
}
_LLAMA_ABSENT = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_GPT2_ALWAYS = {"position": "learned", "norm": "layernorm", "bias": True, "qk_norm": False}
_LLAMA_ALWAYS = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu"}
# Keys of which the GPT here knows one value.
_GPT2_ONLY = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
_LLAMA_ONLY = {"hidden_act": "silu", "use_sliding_window": False}


class UnsupportedError(Exception):
    """The folder's model does something that the GPT here has no setting for: (key of config.json, value, rule)."""


def model_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    """The `model.*` settings that a config.json amounts to.

    KeyError where a size is missing, UnsupportedError where no setting describes the model.
    """
    if found["model_type"] == "gpt2":
        return _gpt2_settings(found)
    return _llama_settings(found)


def describe(family: str, config: ModelConfig) -> dict[str, Any]:
    """What config.json says of `config` in the words of `family`. `config` is resolved (no None left).

    The inverse of `model_settings` where the family can express the model; `other_settings` tells where it cannot.
    """
    keys = {"model_type": family, "initializer_range": config.init_std}
    return keys | (_gpt2_keys(config) if family == "gpt2" else _llama_keys(family, config))


def other_settings(family: str, config: ModelConfig) -> dict[str, Any]:
    """The settings in which every model of the family that is like `config` differs from it, with their values there.

    Empty: the family expresses the model exactly.
    """
    settings = model_settings(describe(family, config))
    others = {name: value for name, value in settings.items() if value != getattr(config, name)}
    heads = config.num_attention_heads
    if family == "llama" and config.hidden_size % heads:  # transformers refuses to build it
        others["hidden_size"] = f"a multiple of {heads}"
    return others


def _gpt2_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    _require(found, **_GPT2_ONLY)
    found = _GPT2_ABSENT | dict(found)
    activation = found["activation_function"]
    if activation not in GELU:
        raise UnsupportedError("activation_function", activation, f"is one of {', '.join(GELU)}")
    settings = {name: found[key] for name, key in _GPT2_KEYS.items()}
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    return settings | {
        "num_key_value_heads": heads,
        "head_size": hidden // heads,
        "ffn_hidden_size": settings["ffn_hidden_size"] or 4 * hidden,
        "activation": GELU[activation],
        **_GPT2_ALWAYS,
    }


def _gpt2_keys(config: ModelConfig) -> dict[str, Any]:
    activations = {activation: name for name, activation in reversed(GELU.items())}  # the first name of each
    return {
        **_GPT2_ONLY,
        **{key: getattr(config, name) for name, key in _GPT2_KEYS.items()},
        "activation_function": activations.get(config.activation, "gelu_new"),
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "embd_pdrop": config.embedding_dropout,
    }


def _llama_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    """Llama, and Qwen3, which adds norms over queries and keys."""
    is_qwen = found["model_type"] == "qwen3"
    found = _LLAMA_ABSENT | dict(found)
    bias = found["attention_bias"]
    _require(found, **_LLAMA_ONLY, mlp_bias=bias)
    if is_qwen and bias:
        raise UnsupportedError(
            "attention_bias", bias, "is false: Qwen3 has biases in attention but not in its MLP then"
        )
    settings = {name: found[key] for name, key in _LLAMA_KEYS.items()}
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    return settings | {
        "num_key_value_heads": settings["num_key_value_heads"] or heads,
        "head_size": settings["head_size"] or (128 if is_qwen else hidden // heads),
        "qk_norm": is_qwen,
        **_LLAMA_ALWAYS,
        **_rope_settings(found),
    }


def _llama_keys(family: str, config: ModelConfig) -> dict[str, Any]:
    bias = config.bias and family == "llama"
    return {
        **_LLAMA_ONLY,
        **{key: getattr(config, name) for name, key in _LLAMA_KEYS.items()},
        "attention_bias": bias,
        "mlp_bias": bias,
        "attention_dropout": config.attention_dropout,
        **_rope_keys(config),
    }


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
    return {"rope_theta": theta, **{name: rope[key] for name, key in _LLAMA3_ROPE_KEYS.items()}}


def _rope_keys(config: ModelConfig) -> dict[str, Any]:
    """In the older of the two forms, which transformers 4 and 5 both read."""
    scaling = {"rope_type": "llama3", **{key: getattr(config, name) for name, key in _LLAMA3_ROPE_KEYS.items()}}
    return {"rope_theta": config.rope_theta, "rope_scaling": None if config.rope_scaling_factor == 1.0 else scaling}


def _require(found: Mapping[str, Any], **needed: Any) -> None:
    """Refuse values of keys for which the GPT here knows only one; an absent key has that one."""
    for key, value in needed.items():
        if found.get(key, value) != value:
            raise UnsupportedError(key, found[key], f"is {value}")

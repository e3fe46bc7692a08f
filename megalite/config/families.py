"""How config.json of five families of transformers and the settings of the one GPT say the same.

The map is data and serves both ways: which key of config.json is which `model.*` setting, and what the family fixes.
What concerns training alone (dropout, start values, the balancing loss) is written, and not read: it is the command's.
So is a capacity, of which config.json says nothing.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from megalite.config.schema import ModelConfig
from megalite.config.settings import yaml_value

ARCHITECTURE = {  # by model_type in config.json
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
FAMILIES = tuple(ARCHITECTURE)
OF_EXPERTS = ("mixtral", "qwen3_moe")  # the others are dense
NAMES = "GPT-2, Llama, Qwen3, Mixtral or Qwen3-MoE"
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
_MIXTRAL_KEYS = {  # beside Llama's
    "moe.num_experts": "num_local_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.ffn_hidden_size": "intermediate_size",
}
_QWEN3_MOE_KEYS = {
    "moe.num_experts": "num_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.ffn_hidden_size": "moe_intermediate_size",
}
_EXPERT_KEYS = {"mixtral": _MIXTRAL_KEYS, "qwen3_moe": _QWEN3_MOE_KEYS}
_STRETCH_KEYS = {
    "rope_scaling_factor": "factor",
    "rope_original_positions": "original_max_position_embeddings",
}
_ROPE_KEYS = {  # by rope_type
    "linear": {"rope_scaling_factor": "factor"},
    "llama3": {
        **_STRETCH_KEYS,
        "rope_low_frequency_factor": "low_freq_factor",
        "rope_high_frequency_factor": "high_freq_factor",
    },
    "yarn": {
        **_STRETCH_KEYS,
        "rope_beta_slow": "beta_slow",
        "rope_beta_fast": "beta_fast",
        "rope_truncate": "truncate",
        "rope_attention_factor": "attention_factor",
        "rope_mscale": "mscale",
        "rope_mscale_all_dim": "mscale_all_dim",
    },
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
_EXPERTS_ABSENT: Mapping[str, Mapping[str, Any]] = {  # beside Llama's
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
}
_GPT2_ALWAYS = {"position": "learned", "norm": "layernorm", "bias": True, "qk_norm": False}
_LLAMA_ALWAYS = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu"}
_WEIGHTING = ("moe.pre_softmax", "moe.normalize_weights")
_EXPERTS_ALWAYS = {
    "moe.num_shared_experts": 0,
    "moe.score": "softmax",
    "moe.scaling_factor": 1.0,
    "moe.num_groups": 1,
    "moe.expert_bias_rate": 0.0,
}
# Keys of which the GPT here knows one value; an absent key has it.
_ONLY: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    "llama": {"hidden_act": "silu", "use_sliding_window": False},
    "qwen3": {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False},
    "mixtral": {"hidden_act": "silu", "sliding_window": None, "attention_bias": False},
    "qwen3_moe": {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False},
}
_PLAIN = {"quantization_config": None, "transformers_weights": None}  # of every family


def keys_of(found: Mapping[str, Any]) -> dict[str, str]:
    """The setting whose type and bounds each key of such a config.json has, those of `rope_of` apart."""
    family = found["model_type"]
    if family == "gpt2":
        return {key: name for name, key in _GPT2_KEYS.items()}
    keys = {key: name for name, key in (_EXPERT_KEYS.get(family, {}) | _LLAMA_KEYS).items()}
    if family == "qwen3_moe":
        keys |= {"norm_topk_prob": "moe.normalize_weights", "decoder_sparse_step": "moe.layer_freq"}
        if "num_experts" not in found and "num_local_experts" in found:  # as transformers 5 calls them for all
            keys["num_local_experts"] = keys.pop("num_experts")
    return keys | {"max_position_embeddings": "max_positions"}


def absent_keys(family: str) -> dict[str, Any]:
    """What transformers takes for keys that config.json lacks."""
    positions = {"max_position_embeddings": None}  # asked for by YaRN alone
    return {**_GPT2_ABSENT} if family == "gpt2" else {**_LLAMA_ABSENT, **positions, **_EXPERTS_ABSENT.get(family, {})}


def rope_of(found: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Its rotary positions, and the setting that each key of them is. They are in `rope_parameters` of transformers 5;
    before, in `rope_scaling` and beside it."""
    told = found.get("rope_parameters") or found.get("rope_scaling") or {}
    rope = {key: value for key, value in told.items() if value is not None}
    beside = {**_EXPERTS_ABSENT.get(found["model_type"], {}), **found}
    outer = {key: beside[key] for key in ("rope_theta", "partial_rotary_factor") if beside.get(key) is not None}
    rope = {"rope_theta": 10000.0, "rope_type": rope.get("type", "default"), **outer, **rope}
    if isinstance(original := found.get("original_max_position_embeddings"), int) and rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = original
    keys = {key: name for name, key in _ROPE_KEYS.get(str(rope["rope_type"]), {}).items()}
    return rope, keys | {"rope_theta": "rope_theta"}


def beyond_settings(found: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Keys whose value no setting here says, with that value and what can be said instead."""
    family = found["model_type"]
    only = {**_PLAIN, **_ONLY[family]}
    if family == "gpt2":
        if (activation := found.get("activation_function", "gelu_new")) not in list(GELU):
            yield "activation_function", activation, " or ".join(GELU)
    elif family == "llama" and (bias := found.get("mlp_bias", False)) != found.get("attention_bias", False):
        yield (
            "attention_bias",
            not bias,
            f"{yaml_value(bias)}, as mlp_bias: biases are in both or in neither (model.bias)",
        )
    for key, value in only.items():
        if found.get(key, value) != value:
            yield key, found[key], yaml_value(value)
    if family == "qwen3" and {*map(str, found.get("layer_types") or [])} - {"full_attention"}:
        yield "layer_types", found["layer_types"], "full_attention in every layer"
    if family == "qwen3_moe" and not _first_and_step(found):
        dense, step = found.get("mlp_only_layers") or [], found.get("decoder_sparse_step", 1)
        yield f"mlp_only_layers with decoder_sparse_step={step}", dense, "every n-th layer, from one on, has experts"
    if family != "gpt2":
        yield from _rope_beyond_settings(found)


def _rope_beyond_settings(found: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    rope, _ = rope_of(found)
    kind = rope["rope_type"]
    if kind not in ["default", *_ROPE_KEYS]:
        yield "rope_type", kind, f"default, {', '.join(_ROPE_KEYS)}"
    elif (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        yield "partial_rotary_factor", part, "1"
    elif kind != "default":
        factor = _yarn_in_full(rope, found)["factor"] if kind == "yarn" else rope["factor"]
        if factor < 1.0:
            yield "factor", factor, "at least 1"
        elif kind == "yarn" and factor == 1.0 and (scale := rope.get("attention_factor", 1.0)) != 1.0:
            yield "attention_factor", scale, "1 with factor=1"


def model_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    """The `model.*` settings that a config.json amounts to: {"num_layers": 12, "moe.top_k": 2, ...}; of the experts
    only where there are some. Keys are of the type of their settings, and none is `beyond_settings`."""
    if found["model_type"] == "gpt2":
        return _gpt2_settings(found)
    return _llama_settings(found)


def differences(theirs: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Of the settings of a model, those that make `config` another one."""
    others = {name: value for name, value in theirs.items() if value != attrgetter(name)(config)}
    if len(config.expert_layers) == config.num_layers:  # no layer has an MLP
        others.pop("ffn_hidden_size", None)
    if "moe.num_experts" in theirs:
        ours = {name: attrgetter(name)(config) for name in theirs}
        if _sum_to_one(theirs) == _sum_to_one(ours):
            others = {name: value for name, value in others.items() if name not in _WEIGHTING}
    return others


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
    others = differences(model_settings(describe(family, config)), config)
    heads = config.num_attention_heads
    if family == "llama" and config.hidden_size % heads:  # transformers refuses to build it
        others["hidden_size"] = f"a multiple of {heads}"
    return others


def _sum_to_one(settings: Mapping[str, Any]) -> bool:
    """Whether the weights of a token's experts do: then it does not matter when the softmax is taken."""
    pre_softmax, normalize = (settings[name] for name in _WEIGHTING)
    return not pre_softmax or (normalize and settings["moe.top_k"] > 1)


def _gpt2_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    found = _GPT2_ABSENT | dict(found)
    settings = {name: found[key] for name, key in _GPT2_KEYS.items()}
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    return settings | {
        "num_key_value_heads": heads,
        "head_size": hidden // heads,
        "ffn_hidden_size": settings["ffn_hidden_size"] or 4 * hidden,
        "activation": GELU[found["activation_function"]],
        **_GPT2_ALWAYS,
    }


def _gpt2_keys(config: ModelConfig) -> dict[str, Any]:
    activations = {activation: name for name, activation in reversed(GELU.items())}  # the first name of each
    return {
        **_ONLY["gpt2"],
        **{key: getattr(config, name) for name, key in _GPT2_KEYS.items()},
        "activation_function": activations.get(config.activation, "gelu_new"),
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "embd_pdrop": config.embedding_dropout,
    }


def _llama_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    """Llama and what differs from it a little: Qwen3 adds norms over queries and keys, and two have experts."""
    family = found["model_type"]
    is_qwen = family in ("qwen3", "qwen3_moe")
    found = {**absent_keys(family), **found}
    settings = {name: found[key] for name, key in _LLAMA_KEYS.items()}
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    return settings | {
        "num_key_value_heads": settings["num_key_value_heads"] or heads,
        "head_size": settings["head_size"] or (128 if family == "qwen3" else hidden // heads),
        "qk_norm": is_qwen,
        **_LLAMA_ALWAYS,
        **_rope_settings(found),
        **(_expert_settings(found) if family in OF_EXPERTS else {}),
    }


def _llama_keys(family: str, config: ModelConfig) -> dict[str, Any]:
    bias = config.bias and family == "llama"
    return {
        **_ONLY["llama"],
        **{key: getattr(config, name) for name, key in _LLAMA_KEYS.items()},
        "attention_bias": bias,
        "mlp_bias": bias,
        "attention_dropout": config.attention_dropout,
        **_rope_keys(config),
        **(_expert_keys(family, config) if family in OF_EXPERTS else {}),
    }


def _expert_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model with experts. In Mixtral each layer has them, and their weights always add up to 1."""
    family, first, step = found["model_type"], 0, 1
    found = {"num_experts": found.get("num_local_experts"), **found}  # what transformers 5 calls them for all
    settings = {name: found[key] for name, key in _EXPERT_KEYS[family].items()}
    normalize = True
    if family == "qwen3_moe":
        pattern = _first_and_step(found)
        assert pattern is not None, "beyond_settings tells it"
        (first, step), normalize = pattern, found["norm_topk_prob"]
    pre_softmax = family == "qwen3_moe" and (not normalize or settings["moe.top_k"] > 1)
    return {
        **settings,
        "moe.first_dense_layers": first,
        "moe.layer_freq": step,
        "moe.pre_softmax": pre_softmax,
        "moe.normalize_weights": normalize,
        **_EXPERTS_ALWAYS,
    }


def _first_and_step(found: Mapping[str, Any]) -> tuple[int, int] | None:
    """The first layer with experts, and of those from there on every how manieth has some; None where they do not
    follow each other so."""
    layers, every = range(found["num_hidden_layers"]), found.get("decoder_sparse_step", 1)
    dense = {*(found.get("mlp_only_layers") or ())}
    mixed = [layer for layer in layers if layer not in dense and (layer + 1) % every == 0]
    first = mixed[0] if mixed else len(layers)
    step = mixed[1] - first if len(mixed) > 1 else max(1, len(layers) - first)
    return (first, step) if mixed and mixed == [*layers[first::step]] else None


def _expert_keys(family: str, config: ModelConfig) -> dict[str, Any]:
    """transformers takes the mean of its balancing losses over the layers, and of top_k shares each; here they are
    added, and the shares are of 1."""
    moe, mixed = config.moe, config.expert_layers
    keys = {
        **{key: attrgetter(name)(config) for name, key in _EXPERT_KEYS[family].items()},
        "router_aux_loss_coef": moe.aux_loss_coeff * len(mixed) / moe.top_k,
        "sliding_window": None,
    }
    if family == "mixtral":
        return keys
    settings = {name: attrgetter(name)(config) for name in ("moe.top_k", *_WEIGHTING)}
    return keys | {
        "norm_topk_prob": _sum_to_one(settings),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(config.num_layers) if layer not in mixed],
    }


def _rope_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    rope, keys = rope_of(found)
    kind = rope["rope_type"]
    if kind == "yarn":
        rope = _yarn_in_full(rope, found)
    if kind == "default" or rope["factor"] == 1.0:
        return {"rope_theta": rope["rope_theta"], "rope_scaling_factor": 1.0}
    return {"rope_scaling": kind, **{name: rope[key] for key, name in keys.items()}}


def _yarn_in_full(rope: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """With what transformers takes for keys that are absent, and without those that it passes over."""
    rope = {"truncate": True, "attention_factor": None, **rope}
    original = rope.get("original_max_position_embeddings") or found["max_position_embeddings"]
    factor = rope["factor"] if "factor" in rope else found["max_position_embeddings"] / original
    scales = {key: rope.get(key) or None for key in ("mscale", "mscale_all_dim")}
    if rope["attention_factor"] is not None or None in scales.values():
        scales = dict.fromkeys(scales)
    betas = {"beta_slow": rope.get("beta_slow") or 1.0, "beta_fast": rope.get("beta_fast") or 32.0}
    return {**rope, **betas, **scales, "factor": factor, "original_max_position_embeddings": original}


def _rope_keys(config: ModelConfig) -> dict[str, Any]:
    """In the older of the two forms, which transformers 4 and 5 both read. What is null is left out."""
    keys = {key: getattr(config, name) for name, key in _ROPE_KEYS[config.rope_scaling].items()}
    scaling = {"rope_type": config.rope_scaling, **{key: value for key, value in keys.items() if value is not None}}
    return {"rope_theta": config.rope_theta, "rope_scaling": None if config.rope_scaling_factor == 1.0 else scaling}

"""Llama, and the base of families with rotary positions, RMSNorm and SwiGLU, which differ from it a little."""

from collections.abc import Iterator
from typing import Any

from megalite.errors.problems import plain
from megalite.hf.families.family import Beyond, Family, Found, Settings

_STRETCHED = {"rope_scaling_factor": "factor", "rope_original_positions": "original_max_position_embeddings"}
_YARN = ("beta_slow", "beta_fast", "truncate", "attention_factor", "mscale", "mscale_all_dim")
MLPS = ("blocks.N.mlp", "blocks.N.moe.experts")
SCALINGS = {  # rope_type: {setting: key}
    "linear": {"rope_scaling_factor": "factor"},
    "llama3": _STRETCHED | {f"rope_{end}_frequency_factor": f"{end}_freq_factor" for end in ("low", "high")},
    "yarn": _STRETCHED | {f"rope_{key}": key for key in _YARN},
}


class RotaryFamily(Family):
    """The base: no biases but where a family says so."""

    keys = {
        **{name: name for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")},
        "num_layers": "num_hidden_layers",
        "head_size": "head_dim",
        "ffn_hidden_size": "intermediate_size",
        "norm_eps": "rms_norm_eps",
        "bias": "attention_bias",
        "tie_embeddings": "tie_word_embeddings",
    }
    also = {"max_position_embeddings": "max_positions"}
    absent = {
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    only = {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False}
    fixed = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "qk_norm": False}
    modules = {
        "embedding.word": ["embed_tokens"],
        "blocks.N.attention_norm": ["layers.N.input_layernorm"],
        "blocks.N.attention.qkv": [f"layers.N.self_attn.{name}_proj" for name in "qkv"],
        "blocks.N.attention.query_norm": ["layers.N.self_attn.q_norm"],
        "blocks.N.attention.key_norm": ["layers.N.self_attn.k_norm"],
        "blocks.N.attention.out": ["layers.N.self_attn.o_proj"],
        "blocks.N.mlp_norm": ["layers.N.post_attention_layernorm"],
        "final_norm": ["norm"],
        # In a model with experts, each is the MLP of a dense file.
        **{f"{place}.gate_up": [f"layers.N.mlp.{name}_proj" for name in ("gate", "up")] for place in MLPS},
        **{f"{place}.down": ["layers.N.mlp.down_proj"] for place in MLPS},
    }

    def settings(self, found: Found) -> dict[str, Any]:
        settings, (rope, keys) = super().settings(found), self.rope(found)
        if rope["rope_type"] == "default" or rope["factor"] == 1.0:
            return settings | {"rope_theta": rope["rope_theta"], "rope_scaling_factor": 1.0}
        return settings | {"rope_scaling": rope["rope_type"], **{name: rope[key] for key, name in keys.items()}}

    def describe(self, settings: Settings) -> dict[str, Any]:
        """Scaled positions are in the older of two forms, which transformers 4 and 5 both read, without nulls; version
        4 takes YaRN's factor from the length."""
        kind, factor = settings["rope_scaling"], settings["rope_scaling_factor"]
        stretched = kind == "yarn" and factor > 1 and round(factor * settings["rope_original_positions"])
        keys = {key: settings[name] for name, key in SCALINGS[kind].items() if settings[name] is not None}
        return super().describe(settings) | {
            **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), False),
            "attention_dropout": settings["attention_dropout"],
            "max_position_embeddings": stretched or settings["max_positions"],
            "rope_theta": settings["rope_theta"],
            "rope_scaling": None if factor == 1.0 else {"rope_type": kind, **keys},
        }

    def beyond(self, found: Found) -> Iterator[Beyond]:
        yield from super().beyond(found)
        rope, _ = self.rope(found)
        if rope["rope_type"] not in ["default", *SCALINGS]:
            yield "rope_type", rope["rope_type"], f"default, {', '.join(SCALINGS)}"
        if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
            yield "partial_rotary_factor", part, "1"
        if rope.get("factor") == 1.0 and (scale := rope.get("attention_factor")) not in (None, 1.0):
            yield "attention_factor", scale, "1 with factor=1"

    def rope(self, found: Found) -> tuple[dict[str, Any], dict[str, str]]:
        """The rotary positions of a config.json, and {key: setting}. They are in `rope_parameters` of transformers 5;
        before, in `rope_scaling` and beside it. YaRN has transformers' values for absent keys, and none for keys that
        transformers passes over."""
        inner = found.get("rope_parameters") or found.get("rope_scaling") or {}
        inner = {key: value for key, value in inner.items() if value is not None}
        beside = {**self.absent, **found}
        outer = {key: beside[key] for key in ("rope_theta", "partial_rotary_factor") if beside.get(key) is not None}
        rope = {"rope_theta": 10000.0, "rope_type": inner.get("type", "default"), **outer, **inner}
        keys = {key: name for name, key in SCALINGS.get(str(rope["rope_type"]), {}).items()}
        if rope["rope_type"] == "yarn":
            original, most = "original_max_position_embeddings", "max_position_embeddings"
            first = found.get(original) or rope.get(original) or found[most]
            rope = {"truncate": True, "attention_factor": None, **rope, original: first}
            rope |= {"factor": rope["factor"] if "factor" in rope else found[most] / first}
            rope |= {"beta_slow": rope.get("beta_slow") or 1.0, "beta_fast": rope.get("beta_fast") or 32.0}
            if rope["attention_factor"] is not None or not (rope.get("mscale") and rope.get("mscale_all_dim")):
                rope |= {"mscale": None, "mscale_all_dim": None}
        return rope, keys | {"rope_theta": "rope_theta"}


class Llama(RotaryFamily):
    """Biases in attention and MLP, or in neither."""

    model_type, architecture = "llama", "LlamaForCausalLM"
    only = {"hidden_act": "silu", "use_sliding_window": False}

    def describe(self, settings: Settings) -> dict[str, Any]:
        return super().describe(settings) | dict.fromkeys(("attention_bias", "mlp_bias"), settings["bias"])

    def beyond(self, found: Found) -> Iterator[Beyond]:
        if (bias := found.get("mlp_bias", False)) != found.get("attention_bias", False):
            rule = f"{plain(bias)}, as mlp_bias: biases are in both or in neither (model.bias)"
            yield "attention_bias", not bias, rule
        yield from super().beyond(found)

    def other_settings(self, settings: Settings) -> dict[str, Any]:
        others, heads = super().other_settings(settings), settings["num_attention_heads"]
        if settings["hidden_size"] % heads:  # transformers refuses to build it
            others["hidden_size"] = f"a multiple of {heads}"
        return others


FAMILY = Llama()

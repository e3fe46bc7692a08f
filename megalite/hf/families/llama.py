"""Llama: biases in attention and MLP, or in neither."""

from collections.abc import Iterator
from typing import Any

from megalite.errors.words import plain
from megalite.hf.families.family import Beyond, Found, Settings
from megalite.hf.families.rotary import RotaryFamily


class Llama(RotaryFamily):
    title, model_type, architecture = "Llama", "llama", "LlamaForCausalLM"
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

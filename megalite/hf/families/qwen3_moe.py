"""Qwen3-MoE: experts in every n-th layer, from one on, with weights that may not add up to 1."""

from collections.abc import Iterator
from typing import Any

from megalite.hf.families.family import Beyond, Found, Settings, expert_layers, weights_sum_to_one
from megalite.hf.families.mixtral import ExpertFamily
from megalite.hf.families.rotary import RotaryFamily


class Qwen3MoE(ExpertFamily):
    title, model_type, architecture = "Qwen3-MoE", "qwen3_moe", "Qwen3MoeForCausalLM"
    fixed = {**ExpertFamily.fixed, "qk_norm": True}
    keys = {
        **RotaryFamily.keys,
        "moe.num_experts": "num_experts",
        "moe.top_k": "num_experts_per_tok",
        "moe.ffn_hidden_size": "moe_intermediate_size",
    }
    absent = {
        **RotaryFamily.absent,
        "num_key_value_heads": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    }
    modules = {
        **RotaryFamily.modules,
        "blocks.N.moe.router": ["layers.N.mlp.gate"],
        "blocks.N.moe.experts.gate_up": [f"layers.N.mlp.experts.E.{name}_proj" for name in ("gate", "up")],
        "blocks.N.moe.experts.down": ["layers.N.mlp.experts.E.down_proj"],
    }

    def names(self, found: Found) -> dict[str, str]:
        keys = super().names(found)
        if "num_experts" not in found and "num_local_experts" in found:
            keys["num_local_experts"] = keys.pop("num_experts")
        return keys | {"norm_topk_prob": "moe.normalize_weights", "decoder_sparse_step": "moe.layer_freq"}

    def settings(self, found: Found) -> dict[str, Any]:
        found = {**self.absent, "num_experts": found.get("num_local_experts"), **found}  # its name in transformers 5
        settings, (first, step) = super().settings(found), _first_and_step(found) or (0, 1)
        return settings | {
            "moe.first_dense_layers": first,
            "moe.layer_freq": step,
            "moe.pre_softmax": not found["norm_topk_prob"] or settings["moe.top_k"] > 1,
            "moe.normalize_weights": found["norm_topk_prob"],
        }

    def describe(self, settings: Settings) -> dict[str, Any]:
        mixed = expert_layers(settings)
        return super().describe(settings) | {
            "norm_topk_prob": weights_sum_to_one(settings),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer in range(settings["num_layers"]) if layer not in mixed],
        }

    def beyond(self, found: Found) -> Iterator[Beyond]:
        yield from super().beyond(found)
        if not _first_and_step(found):
            dense, step = found.get("mlp_only_layers") or [], found.get("decoder_sparse_step", 1)
            rule = "every n-th layer, from one on, has experts"
            yield f"mlp_only_layers with decoder_sparse_step={step}", dense, rule


def _first_and_step(found: Found) -> tuple[int, int] | None:
    """The first layer with experts and the distance to the next; None where the distances differ."""
    layers, every = range(found["num_hidden_layers"]), found.get("decoder_sparse_step", 1)
    dense = {*(found.get("mlp_only_layers") or ())}
    mixed = [layer for layer in layers if layer not in dense and (layer + 1) % every == 0]
    first = mixed[0] if mixed else len(layers)
    step = mixed[1] - first if len(mixed) > 1 else max(1, len(layers) - first)
    return (first, step) if mixed and mixed == [*layers[first::step]] else None


FAMILY = Qwen3MoE()

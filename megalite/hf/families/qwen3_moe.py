"""Qwen3-MoE: experts in every n-th layer, from one on, with weights that may not add up to 1."""

from collections.abc import Iterator
from typing import Any

from megalite.hf.families.family import Beyond, Found, Settings, expert_layers, weights_sum_to_one
from megalite.hf.families.llama import RotaryFamily
from megalite.hf.families.mixtral import ExpertFamily, expert_modules


class Qwen3MoE(ExpertFamily):
    model_type, architecture = "qwen3_moe", "Qwen3MoeForCausalLM"
    fixed = {**ExpertFamily.fixed, "qk_norm": True}
    keys = RotaryFamily.keys | {
        "moe.num_experts": "num_experts",
        "moe.top_k": "num_experts_per_tok",
        "moe.ffn_hidden_size": "moe_intermediate_size",
    }
    also = RotaryFamily.also | {
        "norm_topk_prob": "moe.normalize_weights",
        "decoder_sparse_step": "moe.layer_freq",
        "num_local_experts": "moe.num_experts",  # its name in transformers 5
    }
    absent = {
        **RotaryFamily.absent,
        "num_key_value_heads": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    }
    modules = expert_modules("mlp", "gate", "gate_proj", "up_proj", "down_proj")

    def settings(self, found: Found) -> dict[str, Any]:
        found = {**self.absent, **found}
        found = found if "num_experts" in found else {**found, "num_experts": found["num_local_experts"]}
        settings, (first, step) = super().settings(found), _first_and_step(found) or (0, 1)
        return settings | {
            "moe.first_dense_layers": first,
            "moe.layer_freq": step,
            "moe.pre_softmax": not found["norm_topk_prob"] or settings["moe.top_k"] > 1,
            "moe.normalize_weights": found["norm_topk_prob"],
        }

    def describe(self, settings: Settings) -> dict[str, Any]:
        dense = sorted({*range(settings["num_layers"])} - {*expert_layers(settings)})
        told = {"norm_topk_prob": weights_sum_to_one(settings), "decoder_sparse_step": 1, "mlp_only_layers": dense}
        return super().describe(settings) | told

    def beyond(self, found: Found) -> Iterator[Beyond]:
        yield from super().beyond(found)
        if not _first_and_step(found):
            key = f"mlp_only_layers with decoder_sparse_step={found.get('decoder_sparse_step', 1)}"
            yield key, found.get("mlp_only_layers") or [], "every n-th layer, from one on, has experts"


def _first_and_step(found: Found) -> tuple[int, int] | None:
    """The first layer with experts and the distance to the next; None where the distances differ."""
    layers, every = range(found["num_hidden_layers"]), found.get("decoder_sparse_step", 1)
    dense = {*(found.get("mlp_only_layers") or ())}
    mixed = [layer for layer in layers if layer not in dense and (layer + 1) % every == 0]
    first = mixed[0] if mixed else len(layers)
    step = mixed[1] - first if len(mixed) > 1 else max(1, len(layers) - first)
    return (first, step) if mixed and mixed == [*layers[first::step]] else None


FAMILY = Qwen3MoE()

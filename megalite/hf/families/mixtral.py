"""Mixtral, and the base of families with experts: every layer has them, and a token's weights always add up to 1."""

from collections.abc import Sequence
from typing import Any

from megalite.hf.families.family import Settings, expert_layers
from megalite.hf.families.llama import RotaryFamily


def expert_modules(block: str, router: str, gate: str, up: str, down: str) -> dict[str, Sequence[str]]:
    """The modules of a file with experts, by their names there."""
    experts = f"layers.N.{block}.experts.E"
    return {
        **RotaryFamily.modules,
        "blocks.N.moe.router": [f"layers.N.{block}.{router}"],
        "blocks.N.moe.experts.gate_up": [f"{experts}.{gate}", f"{experts}.{up}"],
        "blocks.N.moe.experts.down": [f"{experts}.{down}"],
    }


class ExpertFamily(RotaryFamily):
    """Families with experts."""

    has_experts = True
    fixed = {
        **RotaryFamily.fixed,
        "moe.num_shared_experts": 0,
        "moe.score": "softmax",
        "moe.scaling_factor": 1.0,
        "moe.num_groups": 1,
        "moe.expert_bias_rate": 0.0,
    }

    def describe(self, settings: Settings) -> dict[str, Any]:
        """transformers takes the mean of its balancing losses over the layers, and of top_k shares each; here they are
        added, and the shares are of 1."""
        share = len(expert_layers(settings)) / settings["moe.top_k"]
        coefficient = settings["moe.aux_loss_coeff"] * share
        return super().describe(settings) | {"router_aux_loss_coef": coefficient, "sliding_window": None}


class Mixtral(ExpertFamily):
    model_type, architecture = "mixtral", "MixtralForCausalLM"
    keys = RotaryFamily.keys | {
        "moe.num_experts": "num_local_experts",
        "moe.top_k": "num_experts_per_tok",
        "moe.ffn_hidden_size": "intermediate_size",
    }
    absent = {**RotaryFamily.absent, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
    only = {"hidden_act": "silu", "sliding_window": None, "attention_bias": False}
    fixed = {
        **ExpertFamily.fixed,
        "moe.first_dense_layers": 0,
        "moe.layer_freq": 1,
        "moe.pre_softmax": False,
        "moe.normalize_weights": True,
    }
    modules = expert_modules("block_sparse_moe", "gate", "w1", "w3", "w2")


FAMILY = Mixtral()

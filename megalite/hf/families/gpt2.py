"""GPT-2: learned positions, layer norms, biases."""

from collections.abc import Iterator
from typing import Any

from megalite.hf.families.family import Beyond, Family, Found, Settings

GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu"}


class GPT2(Family):
    model_type, architecture = "gpt2", "GPT2LMHeadModel"
    prefix, conv1d = "transformer.", True
    keys = {
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "ffn_hidden_size": "n_inner",
        "vocab_size": "vocab_size",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
    }
    absent = {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    only = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    fixed = {"position": "learned", "norm": "layernorm", "bias": True, "qk_norm": False}
    modules = {
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

    def settings(self, found: Found) -> dict[str, Any]:
        settings = super().settings(found)
        width, activation = settings["hidden_size"], GELU[found.get("activation_function", "gelu_new")]
        return settings | {"ffn_hidden_size": settings["ffn_hidden_size"] or 4 * width, "activation": activation}

    def describe(self, settings: Settings) -> dict[str, Any]:
        names = {activation: name for name, activation in reversed(GELU.items())}  # the first name of each
        return super().describe(settings) | {
            "activation_function": names.get(settings["activation"], "gelu_new"),
            "resid_pdrop": settings["dropout"],
            "attn_pdrop": settings["attention_dropout"],
            "embd_pdrop": settings["embedding_dropout"],
        }

    def beyond(self, found: Found) -> Iterator[Beyond]:
        if (activation := found.get("activation_function", "gelu_new")) not in list(GELU):
            yield "activation_function", activation, " or ".join(GELU)
        yield from super().beyond(found)


FAMILY = GPT2()

"""Tiny transformers models with random weights, saved as folders."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from megalite.config.model_folder import imported_model_settings
from megalite.config.schema import Config, ModelConfig
from megalite.config.settings import with_values

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "mscale": 1.3,
    "mscale_all_dim": 0.4,
    "truncate": False,
}
GPT2: dict[str, Any] = {
    "n_layer": 2,
    "n_embd": 24,
    "n_head": 3,
    "n_inner": 40,
    "n_positions": 32,
    "vocab_size": 53,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "layer_norm_epsilon": 1e-4,
}
GROUPED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 53,
    "rms_norm_eps": 1e-4,
}
MIXED: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 3,
    "head_dim": 10,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
}
PEERS: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(**GPT2),
    "gpt2_untied": transformers.GPT2Config(**GPT2, tie_word_embeddings=False, activation_function="gelu"),
    "llama": transformers.LlamaConfig(**GROUPED),
    "llama_tied": transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama3_rope": transformers.LlamaConfig(**GROUPED, rope_parameters=LLAMA3_ROPE),
    "linear_rope": transformers.LlamaConfig(**GROUPED, rope_parameters=LINEAR_ROPE),
    "yarn_rope": transformers.LlamaConfig(**GROUPED, rope_parameters=YARN_ROPE, max_position_embeddings=256),
    "llama_bias": transformers.LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=10),
    "qwen3_tied": transformers.Qwen3Config(**GROUPED, head_dim=10, tie_word_embeddings=True),
    "mixtral": transformers.MixtralConfig(**GROUPED, num_local_experts=5, num_experts_per_tok=3),
    "qwen3_moe": transformers.Qwen3MoeConfig(**MIXED, norm_topk_prob=True, decoder_sparse_step=2),
    "qwen3_moe_unnormalized": transformers.Qwen3MoeConfig(**MIXED, norm_topk_prob=False, mlp_only_layers=[0]),
}


def save_peer(name: str, folder: Path, *, dtype: torch.dtype = torch.float64, **save: Any) -> Any:
    """A fp64 model of kind `name`, saved in `folder`; no parameter is all zeros or ones, which could hide a mistake."""
    config = deepcopy(PEERS[name])  # saving writes the dtype into it
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype).double()
            parameter.copy_((parameter.to(dtype).double() + 0.3 * noise).to(dtype))
    model.to(dtype).save_pretrained(folder, **save)
    return model.double()


def as_in_files(family: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a peer as its folder has them: in memory, those of all experts are one."""
    module = "block_sparse_moe" if family == "mixtral" else "mlp"
    words = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in tensors.items():
        layer, _, matrix = name.partition(".mlp.experts.")
        if not matrix:
            yield name.replace(".mlp.gate.weight", f".{module}.gate.weight"), tensor
        for expert, value in enumerate(tensor if matrix else ()):
            parts = zip(words[:2], value.chunk(2), strict=True) if matrix == "gate_up_proj" else [(words[2], value)]
            yield from ((f"{layer}.{module}.experts.{expert}.{word}.weight", part) for word, part in parts)


def matching_config(folder: Path, **changes: Any) -> ModelConfig:
    """The resolved configuration of the folder's model."""
    settings = {"attention_dropout": 0.0, "embedding_dropout": 0.0, "loss_chunk_tokens": 16, "vocab_multiple": 32}
    settings = {"max_positions": 32, **imported_model_settings(folder), **settings, **changes}
    return with_values(Config(), {f"model.{name}": value for name, value in settings.items()}).model

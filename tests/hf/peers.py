"""Tiny transformers models with random weights, saved as folders, and models of ours beside them."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from megalite.config.derive import derive_model
from megalite.config.model_folder import imported_model_settings
from megalite.config.schema import Config, ModelConfig, MoEConfig
from megalite.config.settings import with_values
from megalite.data.batch import Batch, whole_batch
from megalite.hf.saved_model import import_model
from megalite.model.gpt import GPT
from megalite.model.init import fill, start_values
from megalite.model.parameters import gpt_parameters
from tests.model.small import CPU, GPT2_LIKE, gpt

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"rope_theta": 5000.0, "original_max_position_embeddings": 32}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 8.0, "original_max_position_embeddings": 32}
YARN_ROPE |= {"beta_fast": 4.0, "mscale": 1.3, "mscale_all_dim": 0.4, "truncate": False}
GPT2: dict[str, Any] = {"n_layer": 2, "n_embd": 24, "n_head": 3, "n_inner": 40, "n_positions": 32, "vocab_size": 53}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0, "layer_norm_epsilon": 1e-4}
GROUPED: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 6}
GROUPED |= {"num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 53, "rms_norm_eps": 1e-4}
MIXED: dict[str, Any] = {**GROUPED, "num_hidden_layers": 3, "head_dim": 10}
MIXED |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
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


SMALL: dict[str, dict[str, Any]] = {
    "gpt2": GPT2_LIKE,
    "llama": {"tie_embeddings": False},
    "qwen3": {"qk_norm": True, "head_size": 10},
    "mixtral": {"tie_embeddings": False, "moe": MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=20)},
    "qwen3_moe": {
        "qk_norm": True,
        "head_size": 10,
        "num_layers": 3,
        "moe": MoEConfig(4, 3, ffn_hidden_size=20, first_dense_layers=1, layer_freq=2, pre_softmax=True),
    },
}


def small(family: str, **changes: Any) -> ModelConfig:
    """A resolved configuration with a padded vocabulary; what transformers has defaults for differs from them."""
    shape = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    vocabulary = {"vocab_size": 53, "vocab_multiple": 32, "norm_eps": 3e-4, "rope_theta": 777.0, "init_std": 0.3}
    settings = {**shape, **vocabulary, **SMALL[family], "loss_chunk_tokens": 16, **changes}
    return derive_model(ModelConfig(**settings), seq_length=32)


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


def imported(folder: Path, **changes: Any) -> tuple[ModelConfig, GPT]:
    """The folder's model as ours, in fp64; what it has no weights for is as the seed draws it."""
    config = matching_config(folder, **changes)
    model = gpt(config, dtype=torch.float64, device=CPU, seed=0)
    fill(model, start_values([one for one in gpt_parameters(config) if "router" in one.name], seed=3))
    fill(model, import_model(folder, config))
    return config, model


def of_random_weights(config: ModelConfig) -> tuple[GPT, list[tuple[str, Tensor]]]:
    """A model of ours in fp64, and its parameters by name."""
    generator = torch.Generator().manual_seed(1)
    records = gpt_parameters(config)
    values = [(one.name, torch.randn(one.shape, generator=generator, dtype=torch.float64) * 0.3) for one in records]
    fill(model := gpt(config, dtype=torch.float64, device=CPU, seed=0).eval(), values)
    return model, values


def change_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def batch_of(tokens: Tensor, loss_mask: Tensor | None = None) -> Batch:
    """A batch of [b, s + 1] tokens; without a mask all enter the loss."""
    mask, positions = torch.ones_like(tokens[:, 1:], dtype=torch.bool), torch.arange(tokens.shape[1] - 1)
    mask = mask if loss_mask is None else loss_mask
    return whole_batch(tokens[:, :-1], tokens[:, 1:], mask, positions.expand(mask.shape), None, 0)


def largest_error(ours: Tensor, theirs: Tensor, relative: float) -> float:
    """max|a - b| as a share of what is allowed."""
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / (relative * theirs.abs().max() + 1e-12))


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
    return model_of(settings)


def model_of(settings: dict[str, Any]) -> ModelConfig:
    """The model of these settings and the defaults of others; sizes that follow from others are not derived."""
    return with_values(Config(), {f"model.{name}": value for name, value in settings.items()}).model

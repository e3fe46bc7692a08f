"""The records are the truth about which parameters exist."""

from typing import Any

import pytest
import torch

from megalite.config.schema import ModelConfig
from megalite.model.gpt import GPT
from megalite.model.parameters import gpt_parameters, padded_vocabulary
from tests.model.small import CPU, FAMILIES, small

GPT2: dict[str, Any] = {**FAMILIES["gpt2"], "vocab_size": 50257, "max_positions": 1024, "head_size": 64}
LLAMA3: dict[str, Any] = {"tie_embeddings": False, "vocab_size": 128256, "head_size": 128, "num_key_value_heads": 8}
QWEN3: dict[str, Any] = {"qk_norm": True, "vocab_size": 151936, "head_size": 128, "num_key_value_heads": 8}


def gpt2(layers: int, hidden: int) -> ModelConfig:
    heads = hidden // 64
    sizes = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": 4 * hidden}
    return ModelConfig(
        **{**GPT2, **sizes, "num_attention_heads": heads, "num_key_value_heads": heads}, vocab_multiple=1
    )


def grouped(layers: int, hidden: int, heads: int, ffn: int, **family: Any) -> ModelConfig:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_hidden_size": ffn}
    return ModelConfig(**{**sizes, **family}, vocab_multiple=1)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (gpt2(12, 768), 124_439_808),
        (gpt2(24, 1024), 354_823_168),
        (gpt2(36, 1280), 774_030_080),
        (gpt2(48, 1600), 1_557_611_200),
        (grouped(32, 4096, 32, 14336, **LLAMA3), 8_030_261_248),
        (grouped(80, 8192, 64, 28672, **LLAMA3), 70_553_706_496),
        (grouped(28, 1024, 16, 3072, **QWEN3), 596_049_920),
        (grouped(36, 4096, 32, 12288, **QWEN3, tie_embeddings=False), 8_190_735_360),
    ],
    ids=["gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl", "llama3_8b", "llama3_70b", "qwen3_0_6b", "qwen3_8b"],
)
def test_published_shapes_have_their_published_number_of_parameters(config: ModelConfig, published: int) -> None:
    assert sum(record.numel for record in gpt_parameters(config)) == published


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_has_exactly_the_parameters_of_the_records(family: str, bias: bool, tied: bool) -> None:
    config = small(**{**FAMILIES[family], "bias": bias, "tie_embeddings": tied})
    model = GPT(config, dtype=torch.float32, device=CPU, seed=0)
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert built == {record.name: record.shape for record in gpt_parameters(config)}


def test_the_vocabulary_is_padded_up_to_the_multiple() -> None:
    assert padded_vocabulary(small(vocab_size=65, vocab_multiple=128)) == 128
    assert padded_vocabulary(small(vocab_size=128, vocab_multiple=128)) == 128


def test_weights_decay_and_norms_and_biases_do_not() -> None:
    for record in gpt_parameters(small(**FAMILIES["gpt2"])):
        is_weight = record.name.endswith("weight") and "norm" not in record.name
        assert record.decay == is_weight, record.name


def test_residual_projections_start_smaller() -> None:
    stds = {record.name: record.std for record in gpt_parameters(small(num_layers=8, init_std=0.02))}
    assert stds["blocks.3.attention.out.weight"] == stds["blocks.3.mlp.down.weight"] == 0.02 / 4
    assert stds["blocks.3.attention.qkv.weight"] == stds["embedding.word.weight"] == 0.02

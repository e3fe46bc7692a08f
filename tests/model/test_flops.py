"""Parameter and FLOP counts against published models and sums done by hand; device peaks by name."""

from dataclasses import replace

import pytest

from megalite.config.schema import ModelConfig, MoEConfig
from megalite.model.flops import active_parameters, flops_per_token, matmul_parameters, parameter_count, peak_flops

GPT2 = ModelConfig(
    num_layers=12, hidden_size=768, num_attention_heads=12, num_key_value_heads=12, head_size=64, ffn_hidden_size=3072,
    vocab_size=50257, max_positions=1024, position="learned", norm="layernorm", activation="gelu_tanh", bias=True,
    tie_embeddings=True,
)  # fmt: skip
LLAMA3_8B = ModelConfig(
    num_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_size=128,
    ffn_hidden_size=14336, vocab_size=128256, position="rope", norm="rmsnorm", activation="swiglu", bias=False,
    tie_embeddings=False,
)  # fmt: skip
QWEN3_0_6B = ModelConfig(
    num_layers=28, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_size=128, ffn_hidden_size=3072,
    vocab_size=151936, position="rope", norm="rmsnorm", activation="swiglu", bias=False, qk_norm=True,
    tie_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "published"),
    [(GPT2, 124_439_808), (LLAMA3_8B, 8_030_261_248), (QWEN3_0_6B, 596_049_920)],
    ids=["gpt2", "llama3_8b", "qwen3_0_6b"],
)
def test_parameter_counts_are_those_of_the_published_checkpoints(model: ModelConfig, published: int) -> None:
    assert parameter_count(model) == published


def test_matmul_parameters_are_the_matrices_and_the_head_once() -> None:
    blocks = 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)
    assert matmul_parameters(GPT2) == blocks + 50257 * 768 == 123_532_032


def test_an_untied_input_embedding_multiplies_nothing() -> None:
    embedding = 128256 * 4096
    norms = 32 * 2 * 4096 + 4096
    assert matmul_parameters(LLAMA3_8B) == parameter_count(LLAMA3_8B) - embedding - norms


def test_of_experts_those_count_that_a_token_meets() -> None:
    """Qwen3-30B-A3B: 30.5 and 3.3 billion parameters, as published."""
    moe = MoEConfig(num_experts=128, top_k=8, ffn_hidden_size=768)
    sizes = {"num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4}
    model = replace(QWEN3_0_6B, **sizes, tie_embeddings=False, moe=moe)
    idle = 48 * 120 * 3 * 2048 * 768
    assert parameter_count(model) == 30_532_122_624
    assert active_parameters(model) == parameter_count(model) - idle == 3_353_032_704
    embedding, norms = 151936 * 2048, 48 * (2 * 2048 + 2 * 128) + 2048
    assert matmul_parameters(model) == active_parameters(model) - embedding - norms


def test_gpt2_flops_per_token_by_hand() -> None:
    matrices, attention = 6 * 123_532_032, 12 * 12 * 768 * 1024
    assert flops_per_token(GPT2, 1024, causal=False) == matrices + attention
    assert flops_per_token(GPT2, 1024, causal=True) == matrices + attention / 2


def test_llama3_flops_per_token_are_those_of_the_literature() -> None:
    assert flops_per_token(LLAMA3_8B, 8192, causal=False) / 1e9 == pytest.approx(57.9, abs=0.05)
    assert flops_per_token(LLAMA3_8B, 8192, causal=True) / 1e9 == pytest.approx(51.5, abs=0.05)


def test_attention_flops_count_all_heads_even_where_they_are_wider_than_the_model() -> None:
    longer = flops_per_token(QWEN3_0_6B, 2000, causal=False) - flops_per_token(QWEN3_0_6B, 1000, causal=False)
    assert longer == 12 * 28 * (16 * 128) * 1000


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "float16", 989e12),  # as fast as bf16 where there is bf16
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 NVL", "bfloat16", 835e12),
        ("NVIDIA GH200 480GB", "bfloat16", 989e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA L40", "bfloat16", 181e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA A10G", "bfloat16", 70e12),
        ("NVIDIA GB200", "bfloat16", 2500e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("AMD Instinct MI300X", "bfloat16", 1307e12),
        ("Tesla V100-SXM2-16GB", "float16", 125e12),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla V100-PCIE-32GB", "float16", 112e12),
        ("Tesla V100-SXM2-16GB", "float32", 15.7e12),
        *((name, "bfloat16", None) for name in ("cpu", "NVIDIA H1000", "NVIDIA T4", "AMD Instinct MI300A", "")),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("NVIDIA T4", "float16", None),
    ],
)
def test_dense_peaks_tell_variants_apart(name: str, dtype: str, peak: float | None) -> None:
    assert peak_flops(name, dtype) == peak

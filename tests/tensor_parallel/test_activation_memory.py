"""What a block keeps for backward, counted, is what the formulas of docs/tensor_parallel.md say.

They are those of Korthikanti et al. 2022 (arXiv 2205.05198) for an attention that keeps no scores, and without masks of
dropout, which are derived again. The communicators are torch's fake ones, which move nothing: gloo's threads let go of
the tensors that they have summed some time after the sum is there.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from megalite.config.schema import Config, ModelConfig
from megalite.kernels import attention
from megalite.kernels.attention_mask import BLOCK
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from tests.layouts.training import FAMILIES
from tests.model.small import random_batch, training_config
from tests.pipeline.stages import started
from tests.tensor_parallel.live_bytes import LiveBytes
from tests.tensor_parallel.operations import fake_rank

S, B, H, HEADS = 64, 2, 256, 8
BF16 = 2  # bytes
SHAPES = ("gpt2", "llama")
RECOMPUTE: list[dict[str, Any]] = [
    {},
    {"recompute": "selective", "recompute_modules": ["attention"]},
    {"recompute": "selective", "recompute_modules": ["norm", "activation"]},
    {"recompute": "selective", "recompute_modules": ["attention", "norm", "activation"]},
    {"recompute": "full"},
]


def config_of(
    family: str, t: int = 1, sequence_parallel: bool = False, *, dropout: float = 0.0, length: int = S, **train: Any
) -> Config:
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": H, "num_attention_heads": HEADS, "vocab_size": 64}
    sizes |= {"dropout": dropout, "attention_dropout": 0.0, **FAMILIES[family]}
    parallel = {"tp": t, "sequence_parallel": sequence_parallel}
    return training_config(sizes, length, precision="bf16", parallel=parallel, **train)


def kept_units(config: Config) -> float:
    """The formula: what a block keeps, in elements of one [s, b, h] on this rank. Each term is a tensor."""
    model, t = config.model, config.parallel.tp
    split = t if config.parallel.sequence_parallel else 1
    if config.train.recompute == "full":
        return 1 / split  # the block's input
    again = config.train.recompute_modules if config.train.recompute == "selective" else []
    assert model.ffn_hidden_size is not None
    queries, ffn = 1 / t, model.ffn_hidden_size / H / t
    norm_inputs = 2 / split
    norm_outputs = 0 if "norm" in again else 2 / split  # inputs of qkv and up
    qkv = queries + 2 * groups_on_a_rank(model, t) / HEADS
    attended = 0 if "attention" in again else queries
    up = 2 * ffn if model.activation == "swiglu" else ffn
    activated = 0 if "activation" in again else up  # gelu(up), input of down; swiglu: silu(gate) and its product
    return norm_inputs + norm_outputs + qkv + attended + up + activated


def groups_on_a_rank(model: ModelConfig, t: int) -> int:
    assert model.num_key_value_heads is not None
    return max(1, model.num_key_value_heads // t)


def count(context: ParallelContext, config: Config) -> float:
    """Of one block, in units: what a second one adds."""
    length, kept = config.train.seq_length, []
    for layers in (1, 2):
        model = started(context, replace(config, model=replace(config.model, num_layers=layers))).chunks[0]
        batch = random_batch(config.model, b=B, s=length)
        with LiveBytes(model.parameters()) as live:
            _hidden = model(batch)
            kept.append(live.now())
    return (kept[1] - kept[0]) / (BF16 * length * B * H)


def assert_near(counted: float, formula: float) -> None:
    """Statistics of norms and attention and keys of dropout, a few numbers per row, are above it."""
    assert formula <= counted <= 1.05 * formula


@pytest.mark.parametrize("t", [*(pytest.param(t, marks=pytest.mark.long) for t in (1, 2)), 4])
def test_a_block_keeps_what_the_formula_says(t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's attention kernel. At tp 4 two ranks share each key-value head of the Llama-like block."""
    monkeypatch.setattr(attention, "MAX_ROWS", 0)
    splits = (False, True) if t > 1 else (False,)
    rows = product(SHAPES, splits, RECOMPUTE, (0.0, 0.1))
    configs = [config_of(family, t, split, dropout=p, **train) for family, split, train, p in rows]
    with fake_rank(ParallelLayout(tp=t)) as context:
        for config in configs:
            assert_near(count(context, config), kept_units(config))


@pytest.mark.parametrize("family", SHAPES)
def test_short_sequences_keep_their_probabilities_on_cpus(family: str) -> None:
    """The term that our CPU kernel adds: half of [b, heads, s, s]; its queries are always copied, the rest is not."""
    length = 3 * BLOCK
    config = config_of(family, length=length)
    probabilities = HEADS * (length + BLOCK) / 2 / H
    counted = count(ParallelContext(dtype=torch.bfloat16), config)
    assert_near(counted, kept_units(config) + probabilities)


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_the_formulas_are_those_of_the_paper(t: int) -> None:
    """Bytes of bf16 per s b h (their table 2), but for 2 masks of dropout of one byte, which are not kept here."""
    assert BF16 * kept_units(config_of("gpt2", t)) == 10 + 24 / t - 2
    assert BF16 * kept_units(config_of("gpt2", t, True)) == (34 - 2) / t
    assert BF16 * kept_units(config_of("gpt2", t, recompute="full")) == 2

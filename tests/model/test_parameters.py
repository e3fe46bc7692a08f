"""The records are the truth about which parameters exist."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.layout.parameters import ParameterRecord, Shard, is_counted, is_held, shard
from megalite.model.attention import Attention, BlockInputs
from megalite.model.mlp import MLP
from megalite.model.parameters import gpt_parameters, padded_vocabulary
from megalite.model.recompute import Recompute
from megalite.tensor_parallel.layers import Placement
from tests.layout.shards import cut, slices
from tests.model.small import CPU, FAMILIES, gpt, small

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
    model = gpt(config, dtype=torch.float32, device=CPU, seed=0)
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


SPLIT_DIMS = {
    "embedding.word.weight": 0,
    "head.weight": 0,
    "attention.qkv.weight": 0,
    "attention.qkv.bias": 0,
    "attention.out.weight": 1,
    "mlp.up.weight": 0,
    "mlp.up.bias": 0,
    "mlp.gate_up.weight": 1,
    "mlp.gate_up.bias": 1,
    "mlp.down.weight": 1,
}
SEES_ITS_OWN_HEADS = {"attention.query_norm.weight", "attention.key_norm.weight"}
SEES_ITS_OWN_SEQUENCE = {
    "embedding.position.weight",
    "attention_norm.weight",
    "attention_norm.bias",
    "attention.out.bias",
    "mlp_norm.weight",
    "mlp_norm.bias",
    "mlp.down.bias",
    "final_norm.weight",
    "final_norm.bias",
}
EVERY_KIND = [  # together they have every parameter there is
    small(**FAMILIES["gpt2"], qk_norm=True),
    small(**FAMILIES["llama"], bias=True),
    small(**FAMILIES["qwen3"]),
]


def kind(record: ParameterRecord) -> str:
    """The name without the layer."""
    parts = record.name.split(".")
    return ".".join(parts[2:] if parts[0] == "blocks" else parts)


def test_the_tables_above_know_every_parameter() -> None:
    kinds = {kind(record) for config in EVERY_KIND for record in gpt_parameters(config)}
    assert kinds == SPLIT_DIMS.keys() | SEES_ITS_OWN_HEADS | SEES_ITS_OWN_SEQUENCE


@pytest.mark.parametrize("config", EVERY_KIND, ids=FAMILIES)
def test_products_are_split_over_tp_and_all_else_is_whole(config: ModelConfig) -> None:
    for record in gpt_parameters(config):
        assert (None if record.split is None else record.split.dim) == SPLIT_DIMS.get(kind(record)), record.name


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("config", EVERY_KIND, ids=FAMILIES)
def test_gradients_are_partial_where_a_rank_sees_a_part(config: ModelConfig, sequence_parallel: bool) -> None:
    over_tp = SEES_ITS_OWN_HEADS | (SEES_ITS_OWN_SEQUENCE if sequence_parallel else set())
    for record in gpt_parameters(config, sequence_parallel=sequence_parallel):
        tied = config.tie_embeddings and record.name == "embedding.word.weight"
        expected = ("tp",) if kind(record) in over_tp else ("word-embedding",) if tied else ()
        assert record.partial_over == expected, record.name


@pytest.mark.parametrize("tied", [True, False])
def test_the_stages_hold_every_parameter_once_and_a_tied_embedding_twice(tied: bool) -> None:
    records = gpt_parameters(small(num_layers=6, **{**FAMILIES["gpt2"], "tie_embeddings": tied}))
    stages = [
        (range(0), True, False),
        (range(4), False, False),
        (range(4, 5), False, False),
        (range(5, 6), False, True),
    ]
    holders: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    for layers, embedding, loss in stages:
        held = [record for record in records if is_held(record, layers, embedding=embedding, loss=loss)]
        holders.update(record.name for record in held)
        counters.update(record.name for record in held if is_counted(record, embedding=embedding))
    assert counters == {record.name: 1 for record in records}
    assert holders == {**counters, "embedding.word.weight": 1 + tied}


@pytest.mark.parametrize(
    ("changes", "tp", "shapes"),
    [
        (
            {**FAMILIES["gpt2"], "num_attention_heads": 8, "num_key_value_heads": 8},
            4,
            {
                "embedding.word.weight": (16, 24),
                "embedding.position.weight": (32, 24),
                "attention.qkv.weight": (2, 3, 10, 24),
                "attention.qkv.bias": (2, 3, 10),
                "attention.out.weight": (24, 20),
                "attention.out.bias": (24,),
                "mlp.up.weight": (9, 24),
                "mlp.up.bias": (9,),
                "mlp.down.weight": (24, 9),
                "mlp.down.bias": (24,),
                "final_norm.bias": (24,),
            },
        ),
        (
            {**FAMILIES["llama"], "num_attention_heads": 8},
            2,
            {
                "attention.qkv.weight": (1, 6, 10, 24),
                "attention.out.weight": (24, 40),
                "mlp.gate_up.weight": (2, 18, 24),
            },
        ),
        (
            {**FAMILIES["llama"], "num_attention_heads": 8},
            4,
            {
                "embedding.word.weight": (16, 24),
                "head.weight": (16, 24),
                "attention.qkv.weight": (1, 4, 10, 24),
                "attention.out.weight": (24, 20),
                "mlp.gate_up.weight": (2, 9, 24),
                "mlp.down.weight": (24, 9),
                "attention_norm.weight": (24,),
            },
        ),
    ],
    ids=["gpt2 tp4", "llama tp2", "llama tp4"],
)
def test_known_shards(changes: dict[str, Any], tp: int, shapes: dict[str, tuple[int, ...]]) -> None:
    records = gpt_parameters(small(**changes))
    for index in range(tp):
        local = {kind(record): shard(record, tp, index).shape for record in records}
        assert {name: local[name] for name in shapes} == shapes


def whole_gradient(record: ParameterRecord, shards: list[Shard], gradients: list[Tensor]) -> Tensor:
    """The logical gradient by the rules of the registry: sum what is partial, else take what is counted."""
    total = torch.zeros(record.shape, dtype=gradients[0].dtype)
    for part, gradient in zip(shards, gradients, strict=True):
        for box in part.boxes:
            partial = "tp" in record.partial_over or (record.split is not None and box.replicas > 1)
            if partial or box.counted:
                total[slices(box.offsets, box.sizes)] += gradient[slices(box.local_offsets, box.sizes)]
    return total


def gradients_of(
    module: nn.Module, values: Mapping[str, Tensor], x: Tensor, *inputs: Any
) -> tuple[Tensor, list[Tensor]]:
    """Output and, for a fixed loss of it, the gradient of each parameter in order of `values`."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            assert parameters[name].shape == value.shape, name
            parameters[name].copy_(value)
    y = module(x, *inputs)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return y.detach(), list(torch.autograd.grad((y * weights).sum(), [parameters[name] for name in values]))


def _attention(config: ModelConfig) -> nn.Module:
    return Attention(config, Placement(torch.float64, CPU), Recompute())


def _mlp(config: ModelConfig) -> nn.Module:
    return MLP(config, Placement(torch.float64, CPU))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("prefix", "build", "changes"),
    [
        ("blocks.0.attention.", _attention, {"qk_norm": True, "num_key_value_heads": 2}),
        ("blocks.0.attention.", _attention, {"qk_norm": True, "num_key_value_heads": 8}),
        ("blocks.0.mlp.", _mlp, {"activation": "swiglu"}),
        ("blocks.0.mlp.", _mlp, {"activation": "gelu"}),
    ],
    ids=["grouped queries", "all heads", "gated", "plain"],
)
def test_shards_compute_what_the_whole_does(
    prefix: str, build: Callable[[ModelConfig], nn.Module], changes: dict[str, Any], tp: int
) -> None:
    """Outputs of all ranks add up to the whole module's, gradients by the registry's rules to its gradients."""
    config = small(num_attention_heads=8, **changes)
    kv_heads, ffn = config.num_key_value_heads or 0, config.ffn_hidden_size or 0
    per_rank = {"num_attention_heads": 8 // tp, "num_key_value_heads": max(1, kv_heads // tp)}
    local = small(**{**changes, **per_rank, "ffn_hidden_size": ffn // tp})
    records = {r.name.removeprefix(prefix): r for r in gpt_parameters(config) if r.name.startswith(prefix)}
    generator = torch.Generator().manual_seed(3)
    values = {n: torch.randn(r.shape, generator=generator, dtype=torch.float64) for n, r in records.items()}
    x = torch.randn(5, 2, config.hidden_size, generator=generator, dtype=torch.float64)  # [s, b, h]
    inputs = [BlockInputs()] if build is _attention else []

    y, gradients = gradients_of(build(config), values, x, *inputs)
    shards = {name: [shard(record, tp, index) for index in range(tp)] for name, record in records.items()}
    ranks = []
    for index in range(tp):
        mine = {name: cut(value, shards[name][index]) for name, value in values.items()}
        ranks.append(gradients_of(build(local), mine, x, *inputs))
    torch.testing.assert_close(sum(out for out, _ in ranks), y, rtol=1e-11, atol=1e-11)
    for at, (name, record) in enumerate(records.items()):
        found = whole_gradient(record, shards[name], [of_rank[at] for _, of_rank in ranks])
        assert torch.allclose(found, gradients[at], rtol=1e-10, atol=1e-10), name

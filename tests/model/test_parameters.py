"""The records are the truth about which parameters exist."""

from collections import Counter

import pytest
import torch

from megalite.config.schema import ModelConfig
from megalite.layout.parameters import ParameterRecord, is_counted, is_held, shard
from megalite.layout.stages import StageSettings, stage_layers
from megalite.model.parameters import gpt_parameters, padded_vocabulary
from tests.model.small import CPU, FAMILIES, gpt, small


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
    stages = stage_layers(StageSettings(6, 4, layout="E|tttt|t|tL"))
    holders: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    for stage in stages:
        held = [record for record in records if is_held(record, stage)]
        holders.update(record.name for record in held)
        boxes = [(record, box) for record in held for box in shard(record).boxes]
        counters.update(record.name for record, box in boxes if is_counted(record, box, embedding=stage.embedding))
    assert counters == {record.name: 1 for record in records}
    assert holders == {**counters, "embedding.word.weight": 1 + tied}

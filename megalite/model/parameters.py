"""Every logical parameter of the GPT as plain records: what exists, how it starts, what decays, how it is laid out.

The records hold for every layout. Fused projections keep their structure in the shape: `attention.qkv` holds per
key-value group its queries, its key and its value (so that a shard over groups is a slice of dim 0), `mlp.gate_up` the
gate, then the up projection. The first product of attention and MLP is split by its outputs (heads, ffn), the second by
its inputs, embedding and head by rows of the vocabulary (Shoeybi et al. 2019, arXiv 1909.08053); the rest is whole on
every tp rank. No torch import; `model/gpt.py` declares parameters of these very names and shapes.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import sqrt

from megalite.config.schema import ModelConfig
from megalite.layout.parameters import Group, ParameterRecord, Split, shard_of

Groups = tuple[Group, ...]

ROWS = Split(0, uneven=True)  # of the vocabulary
GROUPS = Split(0, shared_tail=2)  # of the fused attention projection: each has its queries, its key and its value


def padded_vocabulary(config: ModelConfig) -> int:
    """Rows of the embedding and the head: vocab_size, up to the next vocab_multiple whatever the layout."""
    assert config.vocab_size is not None, "the vocabulary is derived before the model is built"
    return -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple


def vocabulary_rows(config: ModelConfig, size: int, index: int) -> int:
    """Rows of the embedding and the head on rank `index` of `size` tensor-parallel ranks."""
    return shard_of((padded_vocabulary(config),), ROWS, size, index).shape[0]


def inner_projection(config: ModelConfig) -> tuple[str, tuple[int, ...]]:
    """Name and outputs of the MLP's first projection."""
    assert config.ffn_hidden_size is not None
    return ("gate_up", (2, config.ffn_hidden_size)) if config.gated else ("up", (config.ffn_hidden_size,))


def gpt_parameters(config: ModelConfig, *, sequence_parallel: bool = False) -> list[ParameterRecord]:
    """All parameters of the model in the order in which activations meet them. `config` is resolved (no None left).

    With `sequence_parallel`, what is replicated over tp outside attention and MLP sees 1/tp of the sequence there.
    """
    on_sequence: Groups = ("tp",) if sequence_parallel else ()
    last = [*_norm("final_norm", config, on_sequence), *_head(config)]
    return [
        *_embedding(config, on_sequence),
        *(replace(record, place=at) for at in range(config.num_layers) for record in _block(at, config, on_sequence)),
        *(replace(record, place=("loss",)) for record in last),
    ]


def _embedding(config: ModelConfig, on_sequence: Groups) -> Iterator[ParameterRecord]:
    word = _vocabulary("embedding.word.weight", config)
    if config.tie_embeddings:  # each copy sees one of its two uses
        yield replace(word, place=("embedding", "loss"), partial_over=("embedding",))
    else:
        yield replace(word, place=("embedding",))
    if config.position == "learned":
        assert config.max_positions is not None
        shape = (config.max_positions, config.hidden_size)
        position = _weight("embedding.position.weight", shape, config.init_std)
        yield replace(position, place=("embedding",), partial_over=on_sequence)


def _head(config: ModelConfig) -> Iterator[ParameterRecord]:
    if not config.tie_embeddings:
        yield _vocabulary("head.weight", config)


def _vocabulary(name: str, config: ModelConfig) -> ParameterRecord:
    shape = (padded_vocabulary(config), config.hidden_size)
    return _weight(name, shape, config.init_std, ROWS)


def _block(layer: int, config: ModelConfig, on_sequence: Groups) -> Iterator[ParameterRecord]:
    yield from _norm(f"blocks.{layer}.attention_norm", config, on_sequence)
    yield from _attention(f"blocks.{layer}.attention", config, on_sequence)
    yield from _norm(f"blocks.{layer}.mlp_norm", config, on_sequence)
    yield from _mlp(f"blocks.{layer}.mlp", config, on_sequence)


def _attention(name: str, config: ModelConfig, on_sequence: Groups) -> Iterator[ParameterRecord]:
    kv_heads, head_size = config.num_key_value_heads, config.head_size
    assert kv_heads is not None
    assert head_size is not None
    heads = config.num_attention_heads
    group = (kv_heads, heads // kv_heads + 2, head_size)  # queries, key, value of each group
    yield _weight(f"{name}.qkv.weight", (*group, config.hidden_size), config.init_std, GROUPS)
    if config.bias:
        yield _zeros(f"{name}.qkv.bias", group, split=GROUPS)
    if config.qk_norm:  # one weight for all heads, of which each tp rank sees its own
        yield _ones(f"{name}.query_norm.weight", head_size, partial_over=("tp",))
        yield _ones(f"{name}.key_norm.weight", head_size, partial_over=("tp",))
    yield _weight(f"{name}.out.weight", (config.hidden_size, heads * head_size), _residual_std(config), Split(1))
    if config.bias:
        yield _zeros(f"{name}.out.bias", (config.hidden_size,), partial_over=on_sequence)


def _mlp(name: str, config: ModelConfig, on_sequence: Groups) -> Iterator[ParameterRecord]:
    hidden, (inner, width) = config.hidden_size, inner_projection(config)
    columns = Split(len(width) - 1)
    yield _weight(f"{name}.{inner}.weight", (*width, hidden), config.init_std, columns)
    if config.bias:
        yield _zeros(f"{name}.{inner}.bias", width, split=columns)
    yield _weight(f"{name}.down.weight", (hidden, width[-1]), _residual_std(config), Split(1))
    if config.bias:
        yield _zeros(f"{name}.down.bias", (hidden,), partial_over=on_sequence)


def _norm(name: str, config: ModelConfig, on_sequence: Groups) -> Iterator[ParameterRecord]:
    yield _ones(f"{name}.weight", config.hidden_size, partial_over=on_sequence)
    if config.norm == "layernorm" and config.bias:
        yield _zeros(f"{name}.bias", (config.hidden_size,), partial_over=on_sequence)


def _residual_std(config: ModelConfig) -> float:
    """2 * num_layers projections add to the residual stream; this keeps its variance at start (GPT-2, section 2.3)."""
    return config.init_std / sqrt(2 * config.num_layers)


def _weight(name: str, shape: tuple[int, ...], std: float, split: Split | None = None) -> ParameterRecord:
    return ParameterRecord(name, shape, "normal", std, decay=True, split=split)


def _zeros(
    name: str, shape: tuple[int, ...], *, split: Split | None = None, partial_over: Groups = ()
) -> ParameterRecord:
    return ParameterRecord(name, shape, "zeros", 0.0, decay=False, split=split, partial_over=partial_over)


def _ones(name: str, size: int, *, partial_over: Groups) -> ParameterRecord:
    return ParameterRecord(name, (size,), "ones", 0.0, decay=False, partial_over=partial_over)

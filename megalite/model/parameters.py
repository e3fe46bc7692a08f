"""Every logical parameter of the GPT as plain records: what exists, how it starts, what decays.

The records hold for every layout. Fused projections keep their structure in the shape: `attention.qkv` holds per
key-value group its queries, its key and its value (so that a shard over groups is a slice of dim 0), `mlp.gate_up` the
gate, then the up projection. No torch import; `model/gpt.py` declares parameters of these very names and shapes.
"""

from collections.abc import Iterator
from math import sqrt

from megalite.config.schema import ModelConfig
from megalite.parallel.parameters import ParameterRecord


def padded_vocabulary(config: ModelConfig) -> int:
    """Rows of the embedding and the head: vocab_size, up to the next vocab_multiple whatever the layout."""
    assert config.vocab_size is not None, "the vocabulary is derived before the model is built"
    return -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple


def gpt_parameters(config: ModelConfig) -> list[ParameterRecord]:
    """All parameters of the model in the order in which activations meet them. `config` is resolved (no None left)."""
    return [*_embedding(config), *_blocks(config), *_norm("final_norm", config), *_head(config)]


def _embedding(config: ModelConfig) -> Iterator[ParameterRecord]:
    yield _weight("embedding.word.weight", (padded_vocabulary(config), config.hidden_size), config.init_std)
    if config.position == "learned":
        assert config.max_positions is not None
        yield _weight("embedding.position.weight", (config.max_positions, config.hidden_size), config.init_std)


def _head(config: ModelConfig) -> Iterator[ParameterRecord]:
    if not config.tie_embeddings:
        yield _weight("head.weight", (padded_vocabulary(config), config.hidden_size), config.init_std)


def _blocks(config: ModelConfig) -> Iterator[ParameterRecord]:
    for layer in range(config.num_layers):
        yield from _norm(f"blocks.{layer}.attention_norm", config)
        yield from _attention(f"blocks.{layer}.attention", config)
        yield from _norm(f"blocks.{layer}.mlp_norm", config)
        yield from _mlp(f"blocks.{layer}.mlp", config)


def _attention(name: str, config: ModelConfig) -> Iterator[ParameterRecord]:
    kv_heads, head_size = config.num_key_value_heads, config.head_size
    assert kv_heads is not None
    assert head_size is not None
    heads = config.num_attention_heads
    group = (kv_heads, heads // kv_heads + 2, head_size)  # queries, key, value of each group
    yield _weight(f"{name}.qkv.weight", (*group, config.hidden_size), config.init_std)
    if config.bias:
        yield _zeros(f"{name}.qkv.bias", group)
    if config.qk_norm:
        yield _ones(f"{name}.query_norm.weight", head_size)
        yield _ones(f"{name}.key_norm.weight", head_size)
    yield _weight(f"{name}.out.weight", (config.hidden_size, heads * head_size), _residual_std(config))
    if config.bias:
        yield _zeros(f"{name}.out.bias", (config.hidden_size,))


def _mlp(name: str, config: ModelConfig) -> Iterator[ParameterRecord]:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    assert ffn is not None
    first, width = ("gate_up", (2, ffn)) if config.activation == "swiglu" else ("up", (ffn,))
    yield _weight(f"{name}.{first}.weight", (*width, hidden), config.init_std)
    if config.bias:
        yield _zeros(f"{name}.{first}.bias", width)
    yield _weight(f"{name}.down.weight", (hidden, ffn), _residual_std(config))
    if config.bias:
        yield _zeros(f"{name}.down.bias", (hidden,))


def _norm(name: str, config: ModelConfig) -> Iterator[ParameterRecord]:
    yield _ones(f"{name}.weight", config.hidden_size)
    if config.norm == "layernorm" and config.bias:
        yield _zeros(f"{name}.bias", (config.hidden_size,))


def _residual_std(config: ModelConfig) -> float:
    """2 * num_layers projections add to the residual stream; this keeps its variance at start (GPT-2, section 2.3)."""
    return config.init_std / sqrt(2 * config.num_layers)


def _weight(name: str, shape: tuple[int, ...], std: float) -> ParameterRecord:
    return ParameterRecord(name, shape, "normal", std, decay=True)


def _zeros(name: str, shape: tuple[int, ...]) -> ParameterRecord:
    return ParameterRecord(name, shape, "zeros", 0.0, decay=False)


def _ones(name: str, size: int) -> ParameterRecord:
    return ParameterRecord(name, (size,), "ones", 0.0, decay=False)

"""Every logical parameter of the GPT as plain records: what exists, how it starts, what decays, how it is laid out.

The records hold for every layout. Fused projections keep their structure in the shape: `attention.qkv` holds per
key-value group its queries, its key and its value (so that a shard over groups is a slice of dim 0), `mlp.gate_up` the
gate, then the up projection. The first product of attention and MLP is split by its outputs (heads, ffn), the second by
its inputs, embedding and head by rows of the vocabulary (Shoeybi et al. 2019, arXiv 1909.08053); the rest is whole on
every tp rank. Experts are split likewise over etp, and divided over ep. `model/gpt.py` declares parameters of these
very names and shapes. No torch import.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import sqrt

from megalite.config.schema import ModelConfig
from megalite.layout.parameters import ROWS, Group, ParameterRecord, Role, Split
from megalite.model.scaling import factors_of

Groups = tuple[Group, ...]

GROUPS = Split(0, replicated=2)  # of the fused attention projection: each has its queries, its key and its value


def padded_vocabulary(config: ModelConfig) -> int:
    """Rows of the embedding and the head: vocab_size, up to the next vocab_multiple whatever the layout."""
    return -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple


def inner_projection(config: ModelConfig, ffn: int | None = None) -> tuple[str, tuple[int, ...]]:
    """Name and outputs of the first projection of an MLP of inner width `ffn`, by default the model's."""
    ffn = ffn or config.ffn_hidden_size
    return ("gate_up", (2, ffn)) if config.gated else ("up", (ffn,))


def shared_width(config: ModelConfig) -> int:
    """Inner width of all shared experts together, which are one MLP; 0: there is none."""
    return config.moe.num_shared_experts * config.moe.ffn_hidden_size


def gpt_parameters(config: ModelConfig, *, sequence_parallel: bool = False) -> list[ParameterRecord]:
    """All parameters of the model in the order in which activations meet them. `config` is resolved (no None left).

    With `sequence_parallel`, what is replicated over tp outside attention and MLP sees 1/tp of the sequence there.
    """
    on_sequence: Groups = ("tp",) if sequence_parallel else ()
    vocabulary = padded_vocabulary(config), config.hidden_size
    word = _weight("embedding.word.weight", vocabulary, config.init_std, "input", ROWS)
    if config.tie_embeddings:  # each copy sees one of its two uses
        records = [replace(word, place=("embedding", "loss"), partial_over=("word-embedding",))]
    else:
        records = [replace(word, place=("embedding",))]
    if config.position == "learned":
        size = config.max_positions, config.hidden_size
        position = _weight("embedding.position.weight", size, config.init_std, "input")
        records.append(replace(position, place=("embedding",), partial_over=on_sequence))
    for layer in range(config.num_layers):
        records += [replace(record, place=layer) for record in _block(layer, config, on_sequence)]
    of_logits: Role = "output" if config.tie_embeddings else "input"  # else the head itself is of this role
    last = [*_norm("final_norm", config, on_sequence, of_logits)]
    if not config.tie_embeddings:
        last.append(_weight("head.weight", vocabulary, config.init_std, "output", ROWS))
    records += [replace(record, place=("loss",)) for record in last]
    return [replace(record, std=record.std * factors_of(record.role, config).start) for record in records]


def _block(layer: int, config: ModelConfig, on_sequence: Groups) -> Iterator[ParameterRecord]:
    heads, kv_heads, head_size = config.num_attention_heads, config.num_key_value_heads, config.head_size
    group = (kv_heads, heads // kv_heads + 2, head_size)  # queries, key, value of each group
    name = f"blocks.{layer}"
    # 2 * num_layers projections add to the residual stream: this keeps its variance at start (GPT-2, section 2.3).
    stds: dict[Role, float] = {
        "hidden": config.init_std,
        "residual": config.init_std / sqrt(2 * (config.mup_base_layers or config.num_layers)),
    }

    def linear(of: str, outputs: tuple[int, ...], inputs: int, role: Role, split: Split) -> Iterator[ParameterRecord]:
        weight = _weight(f"{name}.{of}.weight", (*outputs, inputs), stds[role], role, split)
        heads = split == GROUPS
        yield replace(weight, heads=heads, stacked=0 if heads else len(outputs) - 1)
        if config.bias:
            of_outputs = split.dim < len(outputs)  # else the bias is whole, and added after the sum over ranks
            partial_over = () if of_outputs else on_sequence
            bias = ParameterRecord(f"{name}.{of}.bias", outputs, "zeros", 0.0, decay=False, partial_over=partial_over)
            yield replace(bias, split=split) if of_outputs else replace(bias, role="residual_bias")

    def mlp(of: str, ffn: int | None = None) -> Iterator[ParameterRecord]:
        inner, outputs = inner_projection(config, ffn)
        yield from linear(f"{of}.{inner}", outputs, config.hidden_size, "hidden", Split(len(outputs) - 1))
        yield from linear(f"{of}.down", (config.hidden_size,), outputs[-1], "residual", Split(1))

    yield from _norm(f"{name}.attention_norm", config, on_sequence)
    yield from linear("attention.qkv", group, config.hidden_size, "hidden", GROUPS)
    if config.qk_norm:  # one weight for all heads, of which each tp rank sees its own
        yield _scale(f"{name}.attention.query_norm.weight", head_size, ("tp",), "shared")
        yield _scale(f"{name}.attention.key_norm.weight", head_size, ("tp",), "shared")
    yield from linear("attention.out", (config.hidden_size,), heads * head_size, "residual", Split(1))
    yield from _norm(f"{name}.mlp_norm", config, on_sequence)
    if not config.has_experts(layer):
        yield from mlp("mlp")
        return
    # Each rank of tp routes its own part of the sequence.
    router_size = config.moe.num_experts, config.hidden_size
    router = _weight(f"{name}.moe.router.weight", router_size, config.init_std, "router")
    yield replace(router, precision="master", partial_over=("tp",), stacked=0)
    for record in mlp("moe.experts", config.moe.ffn_hidden_size):  # of each matrix, that of all experts of the layer
        if record.split is not None and record.stacked is not None:  # they have no biases
            shape, split = (config.moe.num_experts, *record.shape), Split(record.split.dim + 1)
            yield replace(record, shape=shape, split=split, stacked=record.stacked + 1, of_experts=True)
    if width := shared_width(config):
        yield from mlp("shared", width)


def _norm(name: str, config: ModelConfig, on_sequence: Groups, role: Role = "vector") -> Iterator[ParameterRecord]:
    weight = _scale(f"{name}.weight", config.hidden_size, on_sequence, role)
    yield weight
    if config.norm == "layernorm" and config.bias:
        yield replace(weight, name=f"{name}.bias", init="zeros", std=0.0)


def _weight(name: str, shape: tuple[int, ...], std: float, role: Role, split: Split | None = None) -> ParameterRecord:
    return ParameterRecord(name, shape, "normal", std, decay=True, split=split, role=role)


def _scale(name: str, size: int, partial_over: Groups, role: Role = "vector") -> ParameterRecord:
    return ParameterRecord(name, (size,), "ones", 1.0, decay=False, partial_over=partial_over, role=role)

"""What tensor parallelism sends, counted on real ranks, is what the formulas of docs/tensor_parallel.md say, byte for
byte."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

from megalite.config.schema import Config, ModelConfig
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import GroupNeeds, ParallelLayout
from megalite.train.step import TrainStep
from tests.layouts.training import FAMILIES
from tests.model.small import random_batch, training_config
from tests.pipeline.stages import started
from tests.ranks import run_ranks
from tests.tensor_parallel.operations import Operations

S, B, H, CHUNK = 32, 2, 32, 24  # the last chunk of the loss is shorter
MICROBATCHES = 2
ALL = ["attention", "norm", "activation"]
COLLECTIVES = ("all_reduce", "allreduce_", "all_gather_into_tensor_out", "reduce_scatter_tensor")
Collective = tuple[str, int]  # what, and the bytes of the whole tensor: a sum's, a gather's result, a scatter's input


def collective(name: str, args: Any, result: Any) -> Collective | None:
    # gloo notes the plain op by a name that is too long for it: see collectives.start_all_gather
    assert name not in ("all_gather_into_tensor", "all_to_all_single", "broadcast_")
    if name not in COLLECTIVES:
        return None
    (tensor,) = args[0] if isinstance(args[0], list) else (result if "gather" in name else args[0],)
    return name.removesuffix("_out"), tensor.nbytes


def config_of(
    family: str, layers: int, t: int, sequence_parallel: bool, *, dropout: float = 0.0, **train: Any
) -> Config:
    sizes: dict[str, Any] = {"num_layers": layers, "hidden_size": H, "num_attention_heads": 4, "vocab_size": 250}
    sizes |= {"vocab_multiple": 7, "loss_chunk_tokens": CHUNK, "dropout": dropout, **FAMILIES[family]}
    parallel = {"tp": t, "sequence_parallel": sequence_parallel, "schedule": "1f1b"}
    return training_config(sizes, S, parallel=parallel, **train)


def count_in_microbatches(context: ParallelContext, configs: list[Config]) -> list[Counter[Collective]]:
    """Forward and backward of one microbatch on the real model with its gradient buffers."""
    found = []
    for config in configs:
        training, batch = started(context, config), random_batch(config.model, b=B, s=S)
        with Operations(collective) as operations:
            training.chunks[0].loss(batch, torch.ones(())).backward()
        found.append(Counter(operations.noted))
    return found


def count_in_step(context: ParallelContext, config: Config) -> Counter[Collective]:
    """A whole step of several microbatches."""
    step = TrainStep(started(context, config), config.optimizer, context)
    batches = [random_batch(config.model, b=B, s=S)] * MICROBATCHES
    with Operations(collective) as operations:
        step(batches, MICROBATCHES * B * S, 1e-3).read()
    return Counter(operations.noted)


def block_sends(config: Config) -> Counter[Collective]:
    """The formula for one block and microbatch. U: the bytes of one [s, b, h]."""
    unit = 4 * S * B * H
    full, dropped = config.train.recompute == "full", config.model.dropout > 0
    if not config.parallel.sequence_parallel:
        return Counter({("all_reduce", unit): 4 + (2 if dropped else 1) * full})
    gathers, scatters = 6 + 2 * full, 4 + (2 if dropped else 1) * full
    return Counter({("all_gather_into_tensor", unit): gathers, ("reduce_scatter_tensor", unit): scatters})


def ends_send(config: Config) -> Counter[Collective]:
    """The formula for embedding and loss of one microbatch: both are a sum forward or back; statistics per chunk."""
    t, unit = config.parallel.tp, 4 * S * B * H
    numbers = 4 if config.train.label_smoothing else 3
    found = Counter({("all_reduce", unit): 2})
    if config.parallel.sequence_parallel:
        found = Counter({("all_gather_into_tensor", unit): 2, ("reduce_scatter_tensor", unit): 2})
    for start in range(0, S * B, CHUNK):
        found["all_gather_into_tensor", 4 * numbers * t * min(CHUNK, S * B - start)] += 1
    return found


def partial_elements(model: ModelConfig, t: int, *, sequence_parallel: bool) -> tuple[int, int]:
    """The formula for gradients summed after the last microbatch: over tp, and over ranks that share a key head."""
    layers, h = model.num_layers, model.hidden_size
    assert model.num_key_value_heads is not None
    assert model.head_size is not None
    biased = model.norm == "layernorm"
    norms = 2 if biased else 1  # weight, bias
    over_tp = 2 * model.head_size * layers if model.qk_norm else 0
    if sequence_parallel:
        positions = model.max_positions or 0  # None: no table
        over_tp += ((2 * norms + 2 * model.bias) * layers + norms + positions) * h
    shares = model.num_key_value_heads < t
    return over_tp, 2 * model.head_size * (h + model.bias) * layers if shares else 0


TRAINING: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"recompute": "selective", "recompute_modules": ALL},
    {"recompute": "full"},
    {"recompute": "full", "dropout": 0.1},
]


@pytest.mark.parametrize("t", [2, 4])
def test_blocks_embedding_and_loss_send_what_the_formulas_say(t: int) -> None:
    """With and without sequence parallelism. A block's part is what a second one adds."""
    families = ("gpt2", "llama") if t == 2 else ("llama",)  # at 4 its ranks share key-value heads
    rows = product(families, (False, True), TRAINING if t == 2 else TRAINING[:1], (1, 2))
    configs = [config_of(family, layers, t, split, **train) for family, split, train, layers in rows]
    for counted in run_ranks(count_in_microbatches, t, configs, layout=ParallelLayout(tp=t)):
        for config, one, two in zip(configs[::2], counted[::2], counted[1::2], strict=True):
            assert two - one == block_sends(config)
            assert one - (two - one) == ends_send(config)


@pytest.mark.parametrize(
    ("family", "t", "sequence_parallel"),
    [("gpt2", 2, True), ("gpt2", 2, False), ("llama", 4, True), ("llama", 4, False), ("qwen3", 2, False)],
)
def test_a_step_sums_the_partial_gradients_once(family: str, t: int, sequence_parallel: bool) -> None:
    config = config_of(family, 2, t, sequence_parallel)
    model = config.model
    over_tp, over_sharers = partial_elements(model, t, sequence_parallel=sequence_parallel)
    each = block_sends(config) + block_sends(config) + ends_send(config)
    expected = Counter({key: MICROBATCHES * count for key, count in each.items()})
    expected["allreduce_", 5 * 8] += 1  # gradient norm, loss, the ranks' flags, tokens to come, fp64
    for elements in (over_tp, over_sharers):
        if elements:
            expected["allreduce_", 4 * elements] += 1
    needs = GroupNeeds(tied_embeddings=model.tie_embeddings, kv_heads=model.num_key_value_heads)
    for counted in run_ranks(count_in_step, t, config, layout=ParallelLayout(tp=t), needs=needs):
        assert counted == expected

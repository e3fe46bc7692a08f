"""What tensor parallelism sends, counted on real ranks, is what the formulas of docs/tensor_parallel.md say, byte for
byte."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config.derive import derive_model
from megalite.config.schema import Config, ModelConfig
from megalite.data.batch import Batch, whole_batch
from megalite.launch.context import ParallelContext
from megalite.layout.groups import GroupNeeds
from megalite.layout.ranks import ParallelLayout
from megalite.train.build import build_training, fill_with_start_values
from megalite.train.step import TrainStep
from tests.ranks import run_ranks

S, B, H, CHUNK = 32, 2, 32, 24  # the last chunk of the loss is shorter
MICROBATCHES = 2
ALL = ["attention", "norm", "activation"]
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "bias": True},
    "llama": {"num_key_value_heads": 2, "tie_embeddings": False},
    "qwen3": {"num_key_value_heads": 2, "qk_norm": True, "head_size": 8},
}
Collective = tuple[str, int]  # what, and the bytes of the whole tensor: a sum's, a gather's result, a scatter's input


@dataclass
class Recorder(TorchDispatchMode):
    """Every collective inside of it over more than one rank."""

    ranks: int
    seen: Counter[Collective] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace in ("_c10d_functional", "c10d") and name != "wait_tensor":
            # gloo notes the plain op by a name that is too long for it: see collectives.start_all_gather
            assert name != "all_gather_into_tensor"
            name = name.removesuffix("_out")
            (tensor,) = args[0] if isinstance(args[0], list) else (args[0],)
            whole = tensor.nbytes * (self.ranks if name == "all_gather_into_tensor" else 1)
            self.seen[name, whole] += 1
        return func(*args, **(kwargs or {}))


def config_of(family: str, layers: int, t: int, sequence_parallel: bool, **train: Any) -> Config:
    config = Config(precision="fp32", device="cpu", seed=7)
    model: dict[str, Any] = {"num_layers": layers, "hidden_size": H, "num_attention_heads": 4, "vocab_size": 250}
    model |= {"vocab_multiple": 7, "loss_chunk_tokens": CHUNK, "dropout": 0.0, **SHAPES[family]}
    model |= {key: train.pop(key) for key in ("dropout",) if key in train}
    config.model = derive_model(replace(config.model, **model), S)
    config.train = replace(config.train, compile=False, seq_length=S, **train)
    config.parallel = replace(config.parallel, tp=t, sequence_parallel=sequence_parallel, schedule="1f1b")
    return config


def microbatch() -> Batch:
    tokens = torch.randint(250, (B, S), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(S).expand(B, S)
    return whole_batch(tokens, tokens.roll(-1, 1), torch.ones(B, S, dtype=torch.bool), positions, None, 0)


def count_in_microbatch(context: ParallelContext, config: Config) -> Counter[Collective]:
    """Forward and backward of one microbatch on the real model with its gradient buffers."""
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    recorder = Recorder(config.parallel.tp)
    with recorder:
        training.chunks[0].loss(microbatch(), torch.ones(())).backward()
    return recorder.seen


def count_in_step(context: ParallelContext, config: Config) -> Counter[Collective]:
    """A whole step of several microbatches."""
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    step = TrainStep(training, config.optimizer, context)
    recorder = Recorder(config.parallel.tp)
    with recorder:
        step([microbatch()] * MICROBATCHES, MICROBATCHES * B * S, 1e-3).read()
    return recorder.seen


def count_all(context: ParallelContext, configs: list[Config]) -> list[Counter[Collective]]:
    return [count_in_microbatch(context, config) for config in configs]


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
    for counted in run_ranks(count_all, t, configs, layout=ParallelLayout(tp=t)):
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

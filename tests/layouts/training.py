"""Trains a few steps on any layout and records everything that must not depend on the layout."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.config.derive import derive, derive_vocabulary
from megalite.config.schema import Config
from megalite.data.batches import TrainBatches
from megalite.data.open import open_data
from megalite.optim.buffers import BufferLayout
from megalite.optim.schedule import learning_rate
from megalite.parallel.context import ParallelContext
from megalite.parallel.parameters import Shard
from megalite.train.job import build_training, derive_device, fill_with_start_values
from megalite.train.step import TrainStep

STEPS = 5
RELATIVE, ABSOLUTE = 1e-10, 1e-12  # the design's bound on every layout against one process, in fp64

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "bias": True},
    "llama": {"num_key_value_heads": 2, "tie_embeddings": False},
    "qwen3": {"num_key_value_heads": 1, "qk_norm": True, "head_size": 8},
}


Tensors = dict[str, Tensor]  # by logical name: what the rank holds of each


@dataclass(frozen=True)
class Trace:
    """What one rank of a run computed. `shards` says where in the logical tensors its own ones belong."""

    losses: list[float]
    grad_norms: list[float]
    tokens: list[int]
    gradients: list[Tensors]  # of each step, after all sums over ranks and before clipping
    parameters: Tensors  # masters after the last step, as are the moments
    first_moments: Tensors
    second_moments: Tensors
    shards: dict[str, Shard]


def small_config(text: Path, cache: Path, family: str = "llama", **overrides: dict[str, Any]) -> Config:
    """A config that trains in milliseconds; `overrides` are per section (train={...})."""
    config = Config(precision="fp64", device="cpu", tokenizer="byte", seed=7)
    config.data = replace(config.data, source="text", path=str(text), cache_dir=str(cache), workers=1)
    config.model = replace(
        config.model, num_layers=2, hidden_size=32, num_attention_heads=4, init_std=0.2, **FAMILIES[family]
    )
    config.train = replace(
        config.train, steps=STEPS, global_batch_size=12, micro_batch_size=1, seq_length=16, eval_batches=1
    )
    config.optimizer = replace(config.optimizer, lr=1e-2, clip_grad=0.05)
    config.lr = replace(config.lr, warmup_steps=2)
    for section, values in overrides.items():
        setattr(config, section, replace(getattr(config, section), **values))
    return derive(config)


def train(context: ParallelContext, config: Config, steps: int = STEPS) -> Trace:
    """A few steps of the real training step on this rank's share of the real batches."""
    data = open_data(config)
    config = derive_device(derive_vocabulary(config, data.vocab_size), context)
    model, buffers, optimizer = build_training(config, context)
    fill_with_start_values(buffers, config, context)
    step = TrainStep(model, buffers, optimizer, config.optimizer, context)
    batches = TrainBatches(
        data.train,
        config,
        dp_rank=context.index("dp"),
        dp_size=context.size("dp"),
        device=context.device,
        start_sample=0,
    )
    figures, gradients = [], []
    for number in range(steps):
        batch = next(batches)
        lr = learning_rate(number, config.lr, peak=config.optimizer.lr, steps=config.train.steps)
        figures.append(step(batch.microbatches, batch.local_tokens, lr).read())
        gradients.append(_by_name(buffers.layout, buffers.gradients))
    batches.close()
    return Trace(
        losses=[f.loss for f in figures],
        grad_norms=[f.grad_norm for f in figures],
        tokens=[f.tokens for f in figures],
        gradients=gradients,
        parameters=_by_name(buffers.layout, buffers.masters),
        first_moments=_by_name(buffers.layout, optimizer.exp_avg),
        second_moments=_by_name(buffers.layout, optimizer.exp_avg_sq),
        shards={slot.record.name: slot.shard for slot in buffers.layout.slots},
    )


def _by_name(layout: BufferLayout, flat: Tensor) -> Tensors:
    return {slot.record.name: slot.view(flat).clone() for slot in layout.slots}


def assert_same_training(found: Trace, reference: Trace) -> None:
    """Every number of `found` within the design's bound of `reference`."""
    assert found.tokens == reference.tokens
    close = {"rtol": RELATIVE, "atol": ABSOLUTE}
    torch.testing.assert_close(found.losses, reference.losses, **close)
    torch.testing.assert_close(found.grad_norms, reference.grad_norms, **close)
    for mine, theirs in zip(found.gradients, reference.gradients, strict=True):
        _assert_same_tensors("gradients", mine, theirs, found.shards)
    for kind in ("parameters", "first_moments", "second_moments"):
        _assert_same_tensors(kind, getattr(found, kind), getattr(reference, kind), found.shards)


def _assert_same_tensors(kind: str, found: Tensors, reference: Tensors, shards: dict[str, Shard]) -> None:
    """Every box that the rank holds is that box of the reference's logical tensor, measured by that tensor's largest
    element: one bound for all would let small parameters be wrong, an absolute one small moments."""
    absolute = 0.0 if kind.endswith("moments") else ABSOLUTE
    assert found.keys() == reference.keys() == shards.keys()
    for name, shard in shards.items():
        largest = float(reference[name].abs().max())
        for box in shard.boxes:
            difference = float((found[name][box.local] - reference[name][box.logical]).abs().max())
            assert difference <= RELATIVE * largest + absolute, f"{kind} of {name}: {difference} of {largest}"

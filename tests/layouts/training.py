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
from megalite.model.init import start_values
from megalite.model.parameters import gpt_parameters
from megalite.optim.schedule import learning_rate
from megalite.parallel.context import ParallelContext
from megalite.train.job import build_training, derive_device
from megalite.train.step import TrainStep

STEPS = 5
RELATIVE, ABSOLUTE = 1e-10, 1e-12  # the design's bound on every layout against one process, in fp64

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "bias": True},
    "llama": {"num_key_value_heads": 2, "tie_embeddings": False},
    "qwen3": {"num_key_value_heads": 1, "qk_norm": True, "head_size": 8},
}


@dataclass(frozen=True)
class Trace:
    """What a run computed. Tensors are flat, in the buffers' order."""

    losses: list[float]
    grad_norms: list[float]
    tokens: list[int]
    gradients: list[Tensor]  # of each step, after the sum over ranks and before clipping
    parameters: Tensor  # after the last step
    moments: Tensor


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


def train(context: ParallelContext, config: Config) -> Trace:
    """Five steps of the real training step on this rank's share of the real batches."""
    data = open_data(config)
    config = derive_device(derive_vocabulary(config, data.vocab_size), context)
    model, buffers, optimizer = build_training(config, context)
    buffers.fill(start_values(gpt_parameters(config.model), config.seed))
    step = TrainStep(model, buffers, optimizer, config.optimizer, data_parallel=context.group("dp-cp"))
    batches = TrainBatches(
        data.train,
        config,
        dp_rank=context.index("dp"),
        dp_size=context.size("dp"),
        device=context.device,
        start_sample=0,
    )
    figures, gradients = [], []
    for number in range(STEPS):
        batch = next(batches)
        lr = learning_rate(number, config.lr, peak=config.optimizer.lr, steps=config.train.steps)
        figures.append(step(batch.microbatches, batch.local_tokens, lr).read())
        gradients.append(buffers.gradients.clone())
    batches.close()
    return Trace(
        losses=[f.loss for f in figures],
        grad_norms=[f.grad_norm for f in figures],
        tokens=[f.tokens for f in figures],
        gradients=gradients,
        parameters=buffers.masters.clone(),
        moments=torch.cat([optimizer.exp_avg, optimizer.exp_avg_sq]),
    )


def assert_same_training(found: Trace, reference: Trace) -> None:
    """Every number of `found` within the design's bound of `reference`."""
    assert found.tokens == reference.tokens
    close = {"rtol": RELATIVE, "atol": ABSOLUTE}
    torch.testing.assert_close(torch.tensor(found.losses).double(), torch.tensor(reference.losses).double(), **close)
    torch.testing.assert_close(found.grad_norms, reference.grad_norms, **close)
    for mine, theirs in zip(found.gradients, reference.gradients, strict=True):
        assert (mine - theirs).abs().max() <= RELATIVE * theirs.abs().max() + ABSOLUTE
    assert (
        found.parameters - reference.parameters
    ).abs().max() <= RELATIVE * reference.parameters.abs().max() + ABSOLUTE
    assert (found.moments - reference.moments).abs().max() <= RELATIVE * reference.moments.abs().max() + ABSOLUTE

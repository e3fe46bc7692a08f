"""A GPT that trains in milliseconds, for tests of what surrounds it."""

from dataclasses import replace
from typing import Any

import torch

from megalite.config.derive import derive
from megalite.config.schema import Config
from megalite.data.batch import Batch, unscored


def small_config(**overrides: dict[str, Any]) -> Config:
    """`overrides` are per section (optimizer={...})."""
    config = Config(device="cpu", seed=3)
    config.model = replace(
        config.model, num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=50, vocab_multiple=1
    )
    config.train = replace(config.train, seq_length=8, compile=False)
    for section, values in overrides.items():
        setattr(config, section, replace(getattr(config, section), **values))
    return derive(config, config.parallel.pp)


def masked_batches(config: Config, sequences: int, dp_size: int) -> list[Batch]:
    """The microbatches of one rank, without a label that enters the loss."""
    size = config.train.micro_batch_size
    tokens = torch.zeros(size, config.train.seq_length, dtype=torch.int64)
    return [unscored(tokens)] * (sequences // size // dp_size)

"""A GPT cut into the stages of a pipeline, and what its ranks train on: for tests of the executor."""

from collections.abc import Callable
from typing import Any

import torch

from megalite.config.schema import Config
from megalite.data.batch import Batch
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.train.build import Training, build_training, fill_with_start_values, needs_of
from tests.model.small import random_batch, training_config
from tests.ranks import run_ranks


def stages_config(pp: int, schedule: str = "1f1b", vpp: int = 1, *, seq_length: int = 16, **model: Any) -> Config:
    """Two layers in each stage, unless `num_layers` says something else; tied embedding, learned positions."""
    sizes: dict[str, Any] = {"num_layers": 2 * pp * vpp, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61}
    sizes |= {"dropout": 0.0, "init_std": 0.2, "position": "learned", **model}
    return training_config(sizes, seq_length, precision="fp64", parallel={"pp": pp, "vpp": vpp, "schedule": schedule})


def microbatches(config: Config, count: int, *, b: int = 2) -> list[Batch]:
    """Random sequences, a quarter of their tokens masked out of the loss; the same on every rank."""
    length = config.train.seq_length
    return [random_batch(config.model, b=b, s=length, first_sample=b * at, seed=at) for at in range(count)]


def started(context: ParallelContext, config: Config) -> Training:
    """A rank's stages with their start values."""
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    return training


def run_pipeline(function: Callable[..., Any], config: Config, *args: Any, dtype: torch.dtype = torch.float64) -> list:
    """`function(context, config, *args)` on the ranks of the config's pipeline; the results, by rank."""
    layout = ParallelLayout(pp=config.parallel.pp, vpp=config.parallel.vpp)
    return run_ranks(
        function, config.parallel.pp, config, *args, dtype=dtype, layout=layout, needs=needs_of(config), timeout=120
    )

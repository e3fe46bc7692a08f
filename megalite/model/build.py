"""From a configuration to the part of the model that lives on this rank: the seam at which pipelines cut it."""

import torch

from megalite.config.schema import Config
from megalite.model.gpt import GPT


def build_stage(config: Config, *, dtype: torch.dtype, device: torch.device, layers: range | None = None) -> GPT:
    """The GPT's layers `layers` (default: all), on `device`, without values in its parameters. `config` is resolved."""
    compile = config.train.compile
    assert compile is not None, "train.compile is derived before the model is built"
    return GPT(
        config.model,
        dtype=dtype,
        device=device,
        seed=config.seed,
        recompute=config.train.recompute,
        compile=compile,
        layers=layers,
    )

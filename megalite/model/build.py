"""From a configuration to the part of the model that lives on this rank: the seam at which pipelines cut it."""

import torch

from megalite.config.schema import Config
from megalite.model.gpt import GPT
from megalite.tensor_parallel.collectives import TensorGroup


def build_stage(
    config: Config,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layers: range | None = None,
    embeds: bool | None = None,
    has_loss: bool | None = None,
    tp: TensorGroup | None = None,
) -> GPT:
    """The GPT's layers `layers` (default: all), on `device`, without values in its parameters. `config` is resolved.

    `embeds` and `has_loss` as in `GPT`. With `tp` it holds this rank's shard of every layer.
    """
    compile = config.train.compile
    assert compile is not None, "train.compile is derived before the model is built"
    return GPT(
        config.model,
        dtype=dtype,
        device=device,
        seed=config.seed,
        recompute=config.train.recompute,
        recompute_layers=config.train.recompute_layers,
        recompute_modules=config.train.recompute_modules,
        compile=compile,
        layers=layers,
        embeds=embeds,
        has_loss=has_loss,
        tp=tp,
        sequence_parallel=bool(config.parallel.sequence_parallel),
        label_smoothing=config.train.label_smoothing,
        z_loss=config.train.z_loss,
    )

"""The model on this rank and all that turns its gradients into its next parameters.

Built without values: they come from the seed, an import or a checkpoint, and are whole on every rank before a step.
"""

from dataclasses import dataclass

import torch

from megalite.config.schema import Config, OptimizerConfig
from megalite.model.build import build_stage
from megalite.model.gpt import GPT
from megalite.model.init import start_values
from megalite.model.parameters import gpt_parameters
from megalite.optim.adamw import FlatAdamW
from megalite.optim.buffer_layout import Kind, slice_ranges
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.gradient_sync import GradientSync
from megalite.optim.loss_scale import LossScale
from megalite.optim.parameter_gather import ParameterGather
from megalite.optim.rank_buffers import rank_buffers
from megalite.optim.sharing import Sharing
from megalite.parallel.context import ParallelContext
from megalite.parallel.device import DTYPES
from megalite.parallel.parameters import ParameterRecord
from megalite.tensor_parallel.collectives import TensorGroup


@dataclass(frozen=True)
class Training:
    """What a training step works on."""

    model: GPT
    buffers: TrainingBuffers
    optimizer: FlatAdamW
    sharing: dict[Kind, Sharing]
    sync: GradientSync
    gather: ParameterGather
    loss_scale: LossScale | None  # in fp16

    def spread_masters(self) -> None:
        """Parameters become the masters of all ranks, rounded to the model's dtype; collective."""
        self.buffers.round_masters()
        self.gather.start()
        self.gather.finish()


def build_training(config: Config, context: ParallelContext) -> Training:
    """The model on its buffers and its optimizer, with no values in them yet. `config` is resolved."""
    settings = config.optimizer
    tp = TensorGroup.of(context.group("tp"))
    model = build_stage(config, dtype=context.dtype, device=context.device, tp=tp)
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)  # the buffers will be its storage
    sharing = Sharing.of_rank(context, zero=settings.zero > 0)
    buffers = TrainingBuffers(
        rank_buffers(config, context.layout, context.rank).layout,
        dtype=context.dtype,
        device=context.device,
        dense=sharing["dense"].index,
        expert=sharing["expert"].index,
        gradient_dtype=_dtype(settings.gradient_dtype, context),
    )
    model.gradient_sinks(buffers.attach(model, sunk=model.sunk_parameters))
    wire = _dtype(settings.communication_dtype or settings.gradient_dtype, context)
    gather = ParameterGather(buffers, sharing, overlap=settings.overlap)
    model.before_use = gather.wait_for
    return Training(
        model,
        buffers,
        _optimizer(buffers, settings, context),
        sharing,
        GradientSync(buffers, model, sharing, wire=wire, overlap=settings.overlap),
        gather,
        _loss_scale(settings, context),
    )


def parameters_of(config: Config) -> list[ParameterRecord]:
    """The registry of the model as this run lays it out."""
    return gpt_parameters(config.model, sequence_parallel=bool(config.parallel.sequence_parallel))


def fill_with_start_values(buffers: TrainingBuffers, config: Config, context: ParallelContext) -> None:
    """Parameters as the seed draws them; each rank draws what it holds."""
    size, index = context.size("tp"), context.index("tp")
    buffers.fill(start_values(parameters_of(config), config.seed, size=size, index=index))


def _optimizer(buffers: TrainingBuffers, settings: OptimizerConfig, context: ParallelContext) -> FlatAdamW:
    """One group of what weight decay touches, one of all else that is trained."""
    decayed = slice_ranges(buffers.owned, lambda record: record.name not in buffers.frozen and record.decay)
    others = slice_ranges(buffers.owned, lambda record: record.name not in buffers.frozen and not record.decay)
    first, second = settings.betas
    return FlatAdamW(
        buffers.masters,
        buffers.gradients,
        [(decayed, settings.weight_decay), (others, 0.0)],
        (first, second),
        settings.eps,
        moments=_dtype(settings.moment_dtype, context),
    )


def _loss_scale(settings: OptimizerConfig, context: ParallelContext) -> LossScale | None:
    if context.dtype != torch.float16:
        return None
    return LossScale(
        initial=settings.initial_loss_scale,
        window=settings.loss_scale_window,
        hysteresis=settings.hysteresis,
        minimum=settings.min_loss_scale,
        device=context.device,
    )


def _dtype(name: str, context: ParallelContext) -> torch.dtype:
    """In fp64 everything that is fp32 elsewhere is fp64."""
    return torch.float64 if context.dtype == torch.float64 else DTYPES[name]

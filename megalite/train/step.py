"""One optimizer step, without waiting on the device.

Microbatches -> gradients of the one loss -> sums over tensor- and data-parallel ranks -> norm -> clipped AdamW. The
loss that is optimised is the loss that is reported: the sum of token losses over the global batch divided by its number
of unmasked tokens, which is known before the first backward. A step whose loss or gradient is not finite changes
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.schema import OptimizerConfig
from megalite.data.batch import Batch
from megalite.model.gpt import GPT
from megalite.optim.adamw import FlatAdamW
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.partial import PartialGradients
from megalite.parallel.context import ParallelContext

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


NORM_ROW = 4096  # elements


@dataclass(frozen=True)
class StepFigures:
    """What one step reports, equal on every rank."""

    loss: float
    grad_norm: float
    tokens: int  # unmasked tokens of the global batch
    skipped: bool  # loss or gradient was not finite: nothing was updated
    stop: bool  # some rank was asked to stop
    refused: bool  # some rank's input was refused, it computed with nothing: nothing was updated


class LaunchedStep:
    """A step that the device may still be working on. What it reports is copied to the host behind it, so that reading
    it later waits for this step and for none that was launched after it."""

    def __init__(self, figures: Tensor) -> None:
        """`figures`: the fields of StepFigures, a device tensor [6]."""
        self._done: torch.cuda.Event | None = None
        self._figures = figures
        if figures.is_cuda:
            self._figures = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._figures.copy_(figures, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def read(self) -> StepFigures:
        """Waits until the step is done."""
        if self._done is not None:
            self._done.synchronize()
        loss, grad_norm, tokens, skipped, stop, refused = self._figures.tolist()
        return StepFigures(loss, grad_norm, int(tokens), skipped > 0, stop > 0, refused > 0)


def gradient_norm(parts: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all elements of the parts together, 0-d fp64.

    torch's CPU kernel adds all squares in a few fp32 sums, which loses 2 % of the norm at 124 million elements: rows of
    4,096 are exact to 1e-6, and their norms are added in fp64. CUDA's kernel adds in a tree.
    """
    norms: list[Tensor] = []
    for part in parts:
        flat = part.reshape(-1)
        whole = 0 if part.is_cuda else flat.numel() // NORM_ROW * NORM_ROW
        norms += [torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1)] if whole else []
        norms += [torch.linalg.vector_norm(flat[whole:]).view(1)]
    norm: Tensor = torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64)
    return norm


class TrainStep:
    """Runs the steps of one rank."""

    def __init__(
        self,
        model: GPT,
        buffers: TrainingBuffers,
        optimizer: FlatAdamW,
        settings: OptimizerConfig,
        context: ParallelContext,
    ) -> None:
        self._model = model
        self._buffers = buffers
        self._optimizer = optimizer
        self._clip = settings.clip_grad
        self._data_parallel = context.group("dp-cp")
        self._model_parallel = context.group("tp-pp")
        self._partial = PartialGradients.of(buffers, context)
        self._counted = buffers.layout.counted(buffers.gradients)
        self._lr = torch.zeros((), dtype=torch.float64, device=buffers.masters.device)

    def __call__(
        self,
        microbatches: Sequence[Batch],
        local_tokens: int,
        lr: float,
        *,
        stop: bool = False,
        refused: bool = False,
    ) -> LaunchedStep:
        """Train on this rank's microbatches, which hold `local_tokens` unmasked labels.

        A rank whose input was `refused` brings `masked_batches`: ranks of the same model compute with it, and all learn
        of it at the end instead of waiting for it. Nothing here waits for the device.
        """
        buffers = self._buffers
        buffers.start_step()
        device = buffers.gradients.device
        # full: a kernel; a copy from the host would wait
        tokens = self._sum(torch.full((), local_tokens, device=device), self._data_parallel)
        scale = tokens.clamp(min=1).to(buffers.gradients.dtype).reciprocal()
        loss = torch.zeros_like(scale)
        for batch in microbatches:
            part = self._model.loss(batch, scale)
            part.backward()
            loss += part.detach()
        self._partial.sum()
        self._sum(buffers.gradients, self._data_parallel)
        flags = [torch.full((), float(flag), dtype=torch.float64, device=device) for flag in (stop, refused)]
        totals = self._sum(torch.stack([loss.double(), *flags]), self._data_parallel)
        squares = gradient_norm(self._counted).square()
        # Ranks of one model hold different parameters; each may have been asked to stop. Their loss is the same.
        shared = self._sum(torch.stack([squares, totals[1], totals[2]]), self._model_parallel)
        return LaunchedStep(self._update(totals[0], shared[0].sqrt(), tokens, lr, shared[1:]))

    def _update(self, loss: Tensor, norm: Tensor, tokens: Tensor, lr: float, flags: Tensor) -> Tensor:
        """Clip, apply unless something is not finite or a rank was refused, and gather the step's figures."""
        gradients = self._buffers.gradients
        skipped = ~(torch.isfinite(norm) & torch.isfinite(loss)) | (flags[1] > 0)
        divisor = ((norm + CLIP_EPSILON) / self._clip).clamp(min=1) if self._clip > 0 else torch.ones_like(norm)
        self._lr.fill_(lr)
        self._optimizer.step(gradients, self._lr, gradient_scale=divisor, skip=skipped.to(torch.float32))
        self._buffers.round_masters()
        return torch.cat([torch.stack([loss, norm, tokens.double(), skipped.double()]), flags])

    def _sum(self, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """`tensor` summed over the ranks of `group`, in place; as it is where there is none."""
        if group is not None:
            dist.all_reduce(tensor, group=group)
        return tensor

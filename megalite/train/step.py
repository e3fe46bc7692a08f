"""One optimizer step, without waiting on the device.

Microbatches -> gradients of the one loss -> sum over data-parallel ranks -> norm -> clipped AdamW. The loss that is
optimised is the loss that is reported: the sum of token losses over the global batch divided by its number of unmasked
tokens, which is known before the first backward. A step whose loss or gradient is not finite changes nothing.
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

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


@dataclass(frozen=True)
class StepFigures:
    """What one step reports, equal on every rank."""

    loss: float
    grad_norm: float
    tokens: int  # unmasked tokens of the global batch
    skipped: bool  # loss or gradient was not finite: nothing was updated
    stop: bool  # some rank was asked to stop

    @classmethod
    def read(cls, figures: Tensor) -> "StepFigures":
        """From the step's device tensor; waits until the step is done."""
        loss, grad_norm, tokens, skipped, stop = figures.tolist()
        return cls(loss, grad_norm, int(tokens), skipped > 0, stop > 0)


class TrainStep:
    """Runs steps on one model replica; `data_parallel` is None where there is only one."""

    def __init__(
        self,
        model: GPT,
        buffers: TrainingBuffers,
        optimizer: FlatAdamW,
        settings: OptimizerConfig,
        *,
        data_parallel: dist.ProcessGroup | None,
    ) -> None:
        self._model = model
        self._buffers = buffers
        self._optimizer = optimizer
        self._clip = settings.clip_grad
        self._data_parallel = data_parallel
        self._lr = torch.zeros((), dtype=torch.float64, device=buffers.masters.device)

    def __call__(self, microbatches: Sequence[Batch], local_tokens: int, lr: float, *, stop: bool = False) -> Tensor:
        """Train on this rank's microbatches, which hold `local_tokens` unmasked labels.

        Returns the device tensor that `StepFigures.read` reads.
        """
        buffers = self._buffers
        buffers.start_step()
        tokens = self._sum(torch.tensor(local_tokens, device=buffers.gradients.device))
        scale = tokens.clamp(min=1).to(buffers.gradients.dtype).reciprocal()
        loss = torch.zeros_like(scale)
        for batch in microbatches:
            part = self._model.loss(batch, scale)
            part.backward()
            loss += part.detach()
        buffers.finish_step()
        self._sum(buffers.gradients)
        totals = self._sum(torch.stack([loss.double(), loss.new_tensor(float(stop), dtype=torch.float64)]))
        return self._update(totals[0], tokens, lr, totals[1])

    def _update(self, loss: Tensor, tokens: Tensor, lr: float, stop: Tensor) -> Tensor:
        """Clip, apply unless something is not finite, and gather the step's figures."""
        gradients = self._buffers.gradients
        norm = torch.linalg.vector_norm(gradients)
        skipped = ~(torch.isfinite(norm) & torch.isfinite(loss))
        divisor = ((norm + CLIP_EPSILON) / self._clip).clamp(min=1) if self._clip > 0 else torch.ones_like(norm)
        self._lr.fill_(lr)
        self._optimizer.step(gradients, self._lr, gradient_scale=divisor, skip=skipped.to(torch.float32))
        self._buffers.round_masters()
        return torch.stack([loss, norm.double(), tokens.double(), skipped.double(), stop])

    def _sum(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over the data-parallel ranks, in place."""
        if self._data_parallel is not None:
            dist.all_reduce(tensor, group=self._data_parallel)
        return tensor

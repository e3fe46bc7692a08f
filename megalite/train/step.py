"""One optimizer step, without waiting on the device.

Microbatches -> gradients of the one loss -> sums over the ranks that share parameters -> norm -> clipped AdamW on this
rank's slices -> parameters of all ranks. The loss that is optimised is the loss that is reported: the sum of token
losses over the global batch divided by its number of unmasked tokens, which is known before the first backward. A step
whose loss or gradient is not finite changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.schema import OptimizerConfig
from megalite.data.batch import Batch
from megalite.optim.norm import counted, gradient_norm
from megalite.optim.partial import PartialGradients
from megalite.parallel.context import ParallelContext
from megalite.train.clock import Lap
from megalite.train.training import Training

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


@dataclass(frozen=True)
class StepFigures:
    """What one step reports, equal on every rank."""

    loss: float
    grad_norm: float
    tokens: int  # unmasked tokens of the global batch
    skipped: bool  # loss or gradient was not finite: nothing was updated
    stop: bool  # some rank was asked to stop
    refused: bool  # some rank's input was refused, it computed with nothing: nothing was updated
    loss_scale: float = 1.0  # what the loss was multiplied by before backward (fp16)


class LaunchedStep:
    """A step that the device may still be working on. What it reports is copied to the host behind it, so that reading
    it later waits for this step and for none that was launched after it."""

    def __init__(self, figures: Tensor, lap: Lap) -> None:
        """`figures`: the fields of StepFigures, a device tensor [7]. `lap`: this rank's times, to be read after it."""
        self.lap = lap
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
        loss, grad_norm, tokens, skipped, stop, refused, loss_scale = self._figures.tolist()
        return StepFigures(loss, grad_norm, int(tokens), skipped > 0, stop > 0, refused > 0, loss_scale)


class TrainStep:
    """Runs the steps of one rank."""

    def __init__(self, training: Training, settings: OptimizerConfig, context: ParallelContext) -> None:
        self._training = training
        self._clip = settings.clip_grad
        self._data_parallel = context.group("dp-cp")
        self._world = context.group("world")
        self._partial = PartialGradients.of(training.buffers, context)
        self._counted = counted(training.buffers, training.sharing, embeds=training.embeds)
        self._tells_loss = training.has_loss and context.index("tp") == 0  # the ranks of tp compute the same one
        self._lr = torch.zeros((), dtype=torch.float64, device=training.buffers.device)
        self._tokens: Tensor | None = None  # of the coming step, if the step before was told

    def __call__(
        self,
        microbatches: Sequence[Batch],
        local_tokens: int,
        lr: float,
        *,
        stop: bool = False,
        refused: bool = False,
        next_local_tokens: int | None = None,
    ) -> LaunchedStep:
        """Train on this rank's microbatches, which hold `local_tokens` unmasked labels.

        With `next_local_tokens`, those of the step to come, the sum that it needs before its first backward comes with
        this step's figures: a sum of its own would queue behind the parameters that are still on their way.
        A rank whose input was `refused` brings `masked_batches`: ranks of the same model compute with it, and all learn
        of it at the end instead of waiting for it. Nothing here waits for the device.
        """
        training, buffers, clock = self._training, self._training.buffers, self._training.clock
        clock.switch("optimizer")
        buffers.start_step()
        device = buffers.device
        # full: a kernel; a copy from the host would wait
        tokens, self._tokens = self._tokens, None
        if tokens is None:
            clock.switch("communication")
            tokens = self._sum(torch.full((), local_tokens, device=device), self._data_parallel)
        one = torch.ones((), dtype=torch.float32, device=device)
        loss_scale = one if training.loss_scale is None else training.loss_scale.value.clone()
        scale = loss_scale / tokens.clamp(min=1).to(buffers.master_dtype)
        loss = training.executor.train(microbatches, scale)
        clock.switch("communication")
        training.sync.finish()
        self._partial.sum()
        clock.switch("optimizer")
        # One reduction: each rank adds what is counted there alone; what is not finite makes the sum so everywhere.
        squares = gradient_norm(self._counted).square() if self._counted else torch.zeros_like(self._lr)
        own_loss = loss.double() if self._tells_loss else torch.zeros_like(self._lr)
        own_next = (next_local_tokens or 0) if self._tells_loss else 0
        told = [torch.full((), float(one), dtype=torch.float64, device=device) for one in (stop, refused, own_next)]
        squares_and_told = torch.stack([squares, own_loss, *told])
        clock.switch("communication")
        total = self._sum(squares_and_told, self._world)
        clock.switch("optimizer")
        if next_local_tokens is not None:
            self._tokens = total[4].to(torch.int64)  # exact up to 2^53
        norm, loss = total[0].sqrt() / loss_scale, total[1] / loss_scale
        self._lr.fill_(lr)
        skipped = self._update(loss, norm, total[3], loss_scale)
        figures = torch.stack([loss, norm, tokens.double(), skipped, total[2], total[3], loss_scale.double()])
        return LaunchedStep(figures, clock.lap())

    def _update(self, loss: Tensor, norm: Tensor, refused: Tensor, loss_scale: Tensor) -> Tensor:
        """Clip and apply, unless something is not finite or a rank was refused; whether it was not, 0-d fp64."""
        training = self._training
        overflow = ~(torch.isfinite(norm) & torch.isfinite(loss))
        skipped = overflow | (refused > 0)
        divisor = loss_scale.double()
        if self._clip > 0:
            divisor = divisor * ((norm + CLIP_EPSILON) / self._clip).clamp(min=1)
        training.gather.finish()  # of the step before: what forward did not use
        training.optimizer.step(self._lr, gradient_scale=divisor, skip=skipped.to(torch.float32))
        if training.loss_scale is not None:
            training.loss_scale.update(overflow.to(torch.float32))
        training.buffers.round_masters()
        training.gather.start()
        return skipped.double()

    def _sum(self, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """`tensor` summed over the ranks of `group`, in place; as it is where there is none."""
        if group is not None:
            dist.all_reduce(tensor, group=group)
        return tensor

"""One optimizer step, in the order in which it happens, without waiting on the device.

The loss that is optimised is the loss that is reported: the sum of token losses over the global batch divided by its
number of unmasked tokens, which is known before the first backward. A step whose loss or gradient is not finite changes
nothing. Nor does one without an unmasked token: its gradients are zero, but weight decay and moments would act all the
same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.schema import OptimizerConfig
from megalite.data.batch import Batch
from megalite.launch.context import ParallelContext
from megalite.optim.norm import counted, gradient_norm
from megalite.optim.partial import partial_gradients
from megalite.train.clock import Lap
from megalite.train.training import Training

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


@dataclass(frozen=True)
class StepFigures:
    """What one step reports, equal on every rank."""

    loss: float
    grad_norm: float
    tokens: int  # unmasked tokens of the global batch
    skipped: bool  # nothing was updated: loss or gradient was not finite, there was no token, or input was refused
    stop: bool  # some rank was asked to stop
    refused: bool  # some rank's input was refused, it computed with nothing
    loss_scale: float = 1.0  # what the loss was multiplied by before backward (fp16)


class DeviceFigures(NamedTuple):
    """The fields of StepFigures while they are on the device: 0-d fp64 each."""

    loss: Tensor
    grad_norm: Tensor
    tokens: Tensor
    skipped: Tensor
    stop: Tensor
    refused: Tensor
    loss_scale: Tensor


class Totals(NamedTuple):
    """What one all-reduce sums over all ranks: 0-d fp64 each. Each rank adds what is counted there alone."""

    squares: Tensor  # of the gradient's elements
    loss: Tensor
    stop: Tensor  # how many ranks were asked to stop
    refused: Tensor  # how many ranks' input was refused
    next_tokens: Tensor  # unmasked tokens of the coming step


class LaunchedStep:
    """A step that the device may still be working on. Its figures are copied to the host behind it, so that reading
    them later waits for this step and for none that was launched after it."""

    def __init__(self, figures: DeviceFigures, lap: Lap) -> None:
        """`lap`: this rank's times, to be read after the figures."""
        self.lap = lap
        self._done: torch.cuda.Event | None = None
        self._figures = torch.stack(figures)
        if self._figures.is_cuda:
            on_device, pinned = self._figures, torch.empty(len(figures), dtype=torch.float64, pin_memory=True)
            self._figures = pinned.copy_(on_device, non_blocking=True)
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
        self._partial = partial_gradients(training.buffers, context)
        self._counted = counted(training.buffers, training.sharing, embeds=training.embeds)
        self._tells_loss = training.has_loss and context.index("tp") == 0  # the ranks of tp compute the same one
        self._zero = torch.zeros((), dtype=torch.float64, device=training.buffers.device)
        self._lr = torch.zeros_like(self._zero)
        self._tokens: Tensor | None = None  # of the coming step, if the step before has summed them

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

        With `next_local_tokens`, those of the coming step, the sum that it needs before its first backward comes with
        this step's figures: a sum of its own would queue behind the parameters that are still on their way.
        A rank whose input was `refused` brings `masked_batches`: ranks of the same model compute with it, and all learn
        of it at the end instead of waiting for it. Nothing here waits for the device.
        """
        training, clock = self._training, self._training.clock
        clock.switch("optimizer")
        training.buffers.start_step()

        # Unmasked tokens of the global batch, by which every token's loss is divided.
        tokens, self._tokens = self._tokens, None
        if tokens is None:
            clock.switch("communication")
            tokens = self._all_reduce(self._number(local_tokens, torch.int64), self._data_parallel)

        # Forward and backward of all microbatches. Each gradient bucket is on its way to the ranks that hold the same
        # parameters (reduce-scatter in the shard group, all-reduce in the replicate group) once backward has filled it.
        loss_scale = self._loss_scale()
        loss = training.executor.train(microbatches, loss_scale / tokens.clamp(min=1).to(training.buffers.master_dtype))

        # The sums of the gradients arrive. Those of which ranks of one model hold a part each are summed over these:
        # tp, ranks with the same key-value heads, the two ends of a pipeline with a tied embedding.
        clock.switch("communication")
        training.sync.finish()
        for partial in self._partial:
            partial.all_reduce()

        # The norm of the gradient, the loss and the flags of all ranks: one all-reduce. Whatever is not finite on one
        # rank makes the sum so on all.
        clock.switch("optimizer")
        own = self._own(loss, stop, refused, next_local_tokens)
        clock.switch("communication")
        total = Totals(*self._all_reduce(torch.stack(own), self._world))
        clock.switch("optimizer")
        norm, loss = total.squares.sqrt() / loss_scale, total.loss / loss_scale
        if next_local_tokens is not None:
            self._tokens = total.next_tokens.to(torch.int64)  # exact up to 2^53

        # Clip, AdamW on this rank's slices, and the all-gather of the new parameters, which the next forward waits for.
        self._lr.fill_(lr)
        skipped = self._update(loss, norm, (total.refused > 0) | (tokens == 0), loss_scale)
        return LaunchedStep(
            DeviceFigures(
                loss=loss,
                grad_norm=norm,
                tokens=tokens.double(),
                skipped=skipped.double(),
                stop=total.stop,
                refused=total.refused,
                loss_scale=loss_scale.double(),
            ),
            clock.lap(),
        )

    def _update(self, loss: Tensor, norm: Tensor, idle: Tensor, loss_scale: Tensor) -> Tensor:
        """Clip and apply, unless something is not finite or all is `idle`; whether it was not applied, 0-d bool."""
        training = self._training
        overflow = ~(torch.isfinite(norm) & torch.isfinite(loss))
        skipped = overflow | idle
        divisor = loss_scale.double()
        if self._clip > 0:
            divisor = divisor * ((norm + CLIP_EPSILON) / self._clip).clamp(min=1)
        training.gather.finish()  # of the step before: what forward did not use
        training.optimizer.step(self._lr, gradient_scale=divisor, skip=skipped.to(torch.float32))
        if training.loss_scale is not None:
            training.loss_scale.update(overflow.to(torch.float32))
        training.buffers.round_masters()
        training.gather.start()
        return skipped

    def _own(self, loss: Tensor, stop: bool, refused: bool, next_local_tokens: int | None) -> Totals:
        """What this rank adds to the totals. One rank of each model adds its loss and tokens."""
        tells = self._tells_loss
        return Totals(
            squares=gradient_norm(self._counted).square() if self._counted else self._zero,
            loss=loss.double() if tells else self._zero,
            stop=self._number(stop, torch.float64),
            refused=self._number(refused, torch.float64),
            next_tokens=self._number((next_local_tokens or 0) if tells else 0, torch.float64),
        )

    def _loss_scale(self) -> Tensor:
        """What the loss is multiplied by before backward, 0-d; 1 where no fp16 needs it."""
        scale = self._training.loss_scale
        if scale is None:
            return self._number(1, self._training.buffers.master_dtype)
        return scale.value.clone()

    def _number(self, value: float, dtype: torch.dtype) -> Tensor:
        """0-d, made on the device by a kernel: a copy from the host would wait."""
        return torch.full((), value, dtype=dtype, device=self._zero.device)

    def _all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """`tensor` summed over the ranks of `group`, in place; as it is where there is none."""
        if group is not None:
            dist.all_reduce(tensor, group=group)
        return tensor

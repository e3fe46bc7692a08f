"""One optimizer step, in the order in which it happens. Only the reading of its metrics waits for the device.

The loss that is optimised is the loss that is reported: the sum of token losses over the global batch divided by its
number of unmasked tokens, which is known before the first backward. Router losses alone are optimised beside it, and
reported separately. A step whose loss or gradient is not finite, or a spike (train.skip_spikes), changes no parameter,
moment or router. A step without an unmasked token does not either: its gradients are zero, but weight decay and moments
would act all the same.
"""

from collections.abc import Callable, Sequence
from math import expm1, inf, log

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.schema import OptimizerConfig
from megalite.data.batch import Batch
from megalite.launch.context import ParallelContext
from megalite.model.gpt import Routers
from megalite.optim.gradients import norm_of, owned_for_norm, partial_gradients, sum_partial
from megalite.optim.layer_norms import LayerNorms
from megalite.optim.qk_clip import QkClip
from megalite.train.build import Training
from megalite.train.metrics import StepMetrics, TimeSplit

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


class PendingMetrics:
    """The metrics of a step that the device may still be working on. They are copied to the host behind it, so that
    reading them later waits for this step and for none that was launched after it."""

    def __init__(
        self,
        numbers: Sequence[Tensor],
        routing: Tensor,
        squares: Tensor,
        layers: Tensor,
        sources: Tensor,
        lap: Callable[[], TimeSplit],
        *,
        fp16: bool,
    ) -> None:
        """`numbers`: the first fields of StepMetrics, then its `largest_logits`, 0-d fp64 each. `routing`, `squares`,
        `layers`, `sources`: its fields, on the device, maybe empty. `lap`: this rank's times, to be read once, then."""
        self._lap, self._fp16 = lap, fp16
        parts = torch.stack(list(numbers)), routing, squares, layers, sources
        on_device = torch.cat([part.flatten() for part in parts])
        on_host = on_device.to("cpu", non_blocking=True).split([part.numel() for part in parts])  # into pinned memory
        self._numbers, *self._tables = (flat.view(part.shape) for flat, part in zip(on_host, parts, strict=True))
        self._done = torch.cuda.current_stream().record_event() if on_device.is_cuda else None

    def read(self) -> StepMetrics:
        """Waits until the step is done."""
        if self._done is not None:
            self._done.synchronize()
        loss, grad_norm, tokens, *others = self._numbers.tolist()
        (skipped, stop, refused), (lr, scale, *logits) = (flag > 0 for flag in others[:3]), others[3:]
        routing, squares, layers, sources = (kept if kept.numel() else None for kept in self._tables)
        scale = scale if self._fp16 else None
        numbers = loss, grad_norm, int(tokens), skipped, stop, refused, lr, scale
        return StepMetrics(*numbers, routing, logits, squares, layers, sources, self._lap())


class TrainStep:
    """Runs the steps of one rank."""

    def __init__(self, training: Training, settings: OptimizerConfig, context: ParallelContext) -> None:
        self._training = training
        self._clip_grad = settings.clip_grad
        self._ema_weight = -expm1(-log(2) / (settings.ema_half_life_steps or inf))  # 1 - 2^(-1 / half-life)
        self._data_parallel = context.group("dp-cp")
        self._world = context.group("world")
        self._partial_gradients = partial_gradients(training.buffers, context)
        self._counted_gradients = owned_for_norm(training.buffers, training.replicas, embeds=training.embeds)
        self._adds_loss = training.chunks[-1].has_loss and context.index("tp") == 0  # ranks of tp compute the same
        self._zero = torch.zeros((), dtype=torch.float64, device=training.buffers.device)
        self._lr = torch.zeros_like(self._zero)
        self._sources = training.chunks[-1].source_sums
        self._routers = Routers(training.chunks)
        self._qk_clip = QkClip(training.buffers, training.chunks, settings.qk_clip, self._world)
        self.updates = False  # whether an update of parameters has ever begun
        self._tokens: Tensor | None = None  # of the coming step, if the step before has summed them

    def __call__(
        self,
        microbatches: Sequence[Batch],
        local_tokens: int,
        lr: float,
        *,
        decay_factor: float = 1.0,
        stop: bool = False,
        refused: bool = False,
        next_local_tokens: int | None = None,
        measures: bool = False,
        layers: LayerNorms | None = None,
    ) -> PendingMetrics:
        """Train on this rank's microbatches, which hold `local_tokens` unmasked labels.

        With `next_local_tokens`, those of the coming step, the next step's token count is summed in this step's
        all-reduce: an all-reduce of its own would wait behind the parameters' all-gather.
        A rank whose input was `refused` brings masked microbatches: ranks of the same model compute with them, and all
        learn of it at the end instead of waiting for it. With `measures` and log.update_sizes the metrics tell sizes;
        with `layers`, which are watching, norms by layer.
        """
        training, clock = self._training, self._training.clock
        clock.switch("optimizer")
        training.buffers.start_step()
        self._routers.start_step()
        self._sources.zero_()
        self._qk_clip.start_step()

        # Unmasked tokens of the global batch, by which every token's loss is divided.
        tokens, self._tokens = self._tokens, None
        if tokens is None:
            clock.switch("communication")
            tokens = self._all_reduce(self._number(local_tokens, torch.int64), self._data_parallel)

        # fp16 multiplies the loss by a scale before backward; otherwise it is 1.
        scale, one = training.loss_scale, self._number(1, training.buffers.master_dtype)
        loss_scale = one if scale is None else scale.state[0].clone()

        # Forward and backward of all microbatches. Once backward has filled a gradient bucket, it is on its way to the
        # ranks that hold the same parameters (zero.py).
        share = loss_scale / tokens.clamp(min=1).to(training.buffers.master_dtype)
        loss = training.executor.forward_backward(microbatches, share)

        # The sums over data-parallel ranks arrive. Partial gradients are then summed over the ranks that have a part of
        # each: tp, ranks with the same key-value heads, the two ends of a pipeline with a tied embedding. (On one stage
        # both uses of a tied embedding have added to one main gradient: the head in the loss's forward.)
        clock.switch("communication")
        training.sync.finish()
        for parts, group in self._partial_gradients:
            sum_partial(parts, group)

        # The norm of the gradient, the loss, the flags and what routers counted, of all ranks: one all-reduce. Ranks of
        # tp know the same loss and tokens: one adds both. What is not finite on one rank makes the sum so on all.
        clock.switch("optimizer")
        adds_loss = self._adds_loss
        own = [
            norm_of(self._counted_gradients).square() if self._counted_gradients else self._zero,
            loss.double() if adds_loss else self._zero,
            self._number(stop, torch.float64),
            self._number(refused, torch.float64),
            self._number((next_local_tokens or 0) if adds_loss else 0, torch.float64),
        ]
        clock.switch("communication")
        numbers, routing, sources = self._sums(torch.stack(own), self._routers.figures(), self._sources)
        squares, loss, stopping, refusing, next_tokens = numbers
        clock.switch("optimizer")
        norm, loss = squares.sqrt() / loss_scale, loss / loss_scale
        if next_local_tokens is not None:
            self._tokens = next_tokens.to(torch.int64)  # exact up to 2^53

        # What keeps the step from being applied, and what clipping divides the gradient by.
        overflow = ~(torch.isfinite(norm) & torch.isfinite(loss))
        skipped = overflow | (refusing > 0) | (tokens == 0)
        if training.spikes is not None:
            skipped = training.spikes.skips(loss, norm, skipped)
        divisor = loss_scale.double()
        if self._clip_grad > 0:
            divisor = divisor * ((norm + CLIP_EPSILON) / self._clip_grad).clamp(min=1)

        # Forward has waited only for the parameters that it used. The rest of the previous all-gather must be there
        # before this rank's slices are updated.
        training.gather.finish()
        self._lr.fill_(lr)
        sizes = training.update_sizes if measures else None
        before = [] if sizes is None else sizes.copies()
        norms = self._zero.new_zeros(0) if layers is None else layers.squares()
        self.updates = True
        training.optimizer.step(self._lr, divisor=divisor, skip=skipped.to(torch.float32), decay_factor=decay_factor)
        logits = self._qk_clip.step(skipped).unbind()
        squares = self._zero.new_zeros(0) if sizes is None else sizes.squares(before)
        if scale is not None:
            scale.update(overflow.to(torch.float32))
        self._routers.update(routing, skipped.double())

        if training.buffers.averages:
            training.buffers.average(self._ema_weight * (~skipped).double())

        # The all-gather of the new parameters, which the next forward waits for.
        if not training.optimizer.rounds:
            training.buffers.round_masters()
        training.gather.start()
        figures = [loss, norm, tokens.double(), skipped.double(), stopping, refusing, self._lr, loss_scale.double()]
        return PendingMetrics(
            [*figures, *logits], routing, squares, norms, sources, clock.lap(), fp16=scale is not None
        )

    def _number(self, value: float, dtype: torch.dtype) -> Tensor:
        """0-d, made on the device by a kernel: a copy from the host would wait."""
        return torch.full((), value, dtype=dtype, device=self._zero.device)

    def _sums(self, *tables: Tensor) -> list[Tensor]:
        """Each of them summed over all ranks, in one all-reduce."""
        summed = self._all_reduce(torch.cat([table.flatten() for table in tables]), self._world)
        parts = summed.split([table.numel() for table in tables])
        return [part.view_as(table) for part, table in zip(parts, tables, strict=True)]

    def _all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """`tensor` summed over the ranks of `group`, in place; as it is where there is none."""
        if group is not None:
            dist.all_reduce(tensor, group=group)
        return tensor

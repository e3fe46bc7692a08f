"""AdamW (Loshchilov and Hutter 2019) over slices of buckets, driven by device tensors alone.

Masters, gradients and both moments are lists of one-dimensional tensors, one per bucket: what this rank owns of it. A
group is a set of runs of elements with one factor of the learning rate, one weight decay and one factor of eps. A step
has two forms of the same update:

- torch's fused kernel, one call for each group through views made once. It wants one dtype: where gradients or the
  first moment are narrower than the masters, they are widened, updated and rounded back a piece at a time.
- a compiled kernel, one call for each bucket, which reads and writes every number once and rounds the masters into the
  parameters too: with fp32 gradients and moments and bf16 parameters 30 bytes per parameter instead of 38.

Learning rate, clipping and the decision to skip a step arrive as device tensors, so that nothing waits for the device.
With optimizer.cautious an element is decayed, but not updated, unless first moment and gradient have the same sign
(Liang et al. 2024, arXiv 2411.16085, without its division by the share of such elements in a tensor, a sum over ranks).

The second moment is as wide as the masters: at a beta2 of 0.999 it shrinks by at most 0.1 % a step, less than half a
spacing of bf16 (up to 0.8 %), so in bf16 it would almost never decrease.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from megalite.config.schema import OptimizerConfig
from megalite.layout.buffer_layout import ALIGNMENT, SliceRange
from megalite.optim.buffers import TrainingBuffers, dtype_of, ranges_of
from megalite.optim.groups import UpdateRule

PIECE = 2**18  # elements that a CPU widens at once: their fp32 copies stay in a core's cache
CUDA_PIECE = 2**26  # on CUDA: few enough launches, and 256 MiB for a copy
Groups = Sequence[tuple[Sequence[SliceRange], UpdateRule]]  # runs that do not overlap


class FlatAdamW:
    """The optimizer (optimizer.py) of the masters of `buffers`, whose runs are in one of `groups` each.

    Buckets of `without` are another optimizer's. Each moment lies in one block of memory. Applied steps are counted on
    the device, exactly up to 2^24. A `compiled` step wants runs that begin at multiples of ALIGNMENT; it alone can
    round the masters into the parameters (`rounds`).
    """

    def __init__(
        self,
        buffers: TrainingBuffers,
        groups: Groups,
        settings: OptimizerConfig,
        *,
        compiled: bool,
        rounds: bool = False,
        without: Collection[int] = (),
    ) -> None:
        self.masters, self.gradients, self._compiled = buffers.masters, buffers.gradients, compiled
        self._dtype, self._betas, self._eps = buffers.master_dtype, settings.betas, settings.eps
        self._cautious = settings.cautious
        sizes = [0 if bucket in without else len(master) for bucket, master in enumerate(self.masters)]
        first_moment = dtype_of(settings.moment_dtype, self._dtype)
        self.exp_avg = list(torch.zeros(sum(sizes), dtype=first_moment, device=buffers.device).split(sizes))
        self.exp_avg_sq = list(torch.zeros(sum(sizes), dtype=self._dtype, device=buffers.device).split(sizes))
        self.step_count = torch.zeros((), dtype=torch.float32, device=buffers.device)
        self.before_change: Callable[[], None] = lambda: None
        self.rounds = rounds
        self._widened = {first_moment, *(gradient.dtype for gradient in self.gradients)} != {self._dtype}
        first, second = settings.betas
        constants = [first, 1.0 - first, second, 1.0 - second, settings.eps]
        self._constants = torch.tensor(constants, dtype=self._dtype, device=buffers.device)
        if compiled:
            self._rows = list(self._rows_of(buffers.parameters, groups))
        else:
            self._calls = [(views, rule) for runs, rule in groups for views in self._views_of(runs)]

    def state(self) -> Mapping[str, list[Tensor] | Tensor]:
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "step": self.step_count.view(1)}

    @torch.no_grad()
    def step(self, lr: Tensor, *, divisor: Tensor, skip: Tensor, decay_factor: float = 1.0) -> None:
        self.before_change()
        skip = skip.to(torch.float32)
        self.step_count += 1.0 - skip
        (self._compiled_step if self._compiled else self._fused_step)(lr, divisor, skip, decay_factor)

    def _fused_step(self, lr: Tensor, scale: Tensor, skip: Tensor, decay_factor: float) -> None:
        # CUDA's kernel reads the rate as fp32, in fp64 too; the CPU's takes it as it is.
        lr = lr.to(torch.float32) if lr.is_cuda else lr
        scale, exact = scale.to(self._dtype), self._dtype == torch.float64
        for (masters, gradients, kept, exp_avg_sq), rule in self._calls:
            exp_avg = kept
            if self._widened:  # into copies in the masters' dtype; a skipped step rounds them back to the same bits
                gradients, exp_avg = ([tensor.to(self._dtype) for tensor in each] for each in (gradients, kept))
            rate, decay = lr if rule.factor == 1 else lr * rule.factor, rule.decay * decay_factor
            decayed = list[Tensor]()
            if self._cautious:  # what masters are without an update; in a skipped step as they were
                kept_share = 1.0 - rate * decay * (1.0 - skip)
                decayed = [master * kept_share for master in masters]
            if exact:  # the kernel would round the scale to fp32
                torch._foreach_div_(gradients, scale)
            torch._fused_adamw_(
                *(masters, gradients, exp_avg, exp_avg_sq, []),
                [self.step_count] * len(masters),  # only read: one count serves all
                lr=rate,
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=decay,
                eps=self._eps * rule.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=None if exact else scale,
                found_inf=skip,
            )
            for updated, mean, gradient, other in zip(masters, exp_avg, gradients, decayed, strict=self._cautious):
                torch.lerp(other, updated, _agreement(mean, gradient), out=updated)  # one of the two, exactly
            if exp_avg[0] is not kept[0]:
                torch._foreach_copy_(kept, exp_avg)

    def _views_of(self, runs: Sequence[SliceRange]) -> Iterator[list[list[Tensor]]]:
        """Masters, gradients and moments of one group, for one kernel call; a piece at a time where it makes copies."""
        size = CUDA_PIECE if self.step_count.is_cuda else PIECE
        calls = [runs] if runs else []
        if self._widened or self._cautious:
            calls = [
                [SliceRange(run.bucket, start, min(start + size, run.stop))]
                for run in runs
                for start in range(run.start, run.stop, size)
            ]
        for call in calls:
            yield [ranges_of(part, call) for part in (self.masters, self.gradients, self.exp_avg, self.exp_avg_sq)]

    def _compiled_step(self, lr: Tensor, scale: Tensor, skip: Tensor, decay_factor: float) -> None:
        first, second = self._betas
        steps = self.step_count.double()
        step_size, root = lr / (1.0 - first**steps), (1.0 - second**steps).rsqrt()
        numbers = torch.stack([lr.double() * decay_factor, step_size, root, scale.double(), skip.double()])
        numbers = numbers.to(self._dtype)  # [5]: kernels read numbers of their own dtype
        for tensors in self._rows:
            _compiled_update()(*tensors, numbers, self._constants, self._cautious)

    def _rows_of(self, parameters: Sequence[Tensor], groups: Groups) -> Iterator[tuple[Tensor | None, ...]]:
        """The first arguments of `_update_rows` for each bucket. Padding, which lies in no run, has no decay."""
        rates, epses = any(rule.factor != 1 for _, rule in groups), any(rule.eps != 1 for _, rule in groups)
        lists = (self.masters, self.gradients, self.exp_avg, self.exp_avg_sq, parameters)
        for bucket, (master, *others, parameter) in enumerate(zip(*lists, strict=True)):
            if len(others[1]) < len(master):
                continue  # one of `without`
            of_rows = torch.tensor([[1.0], [0.0], [1.0]], dtype=master.dtype).repeat(1, len(master) // ALIGNMENT)
            for run, rule in ((run, rule) for runs, rule in groups for run in runs if run.bucket == bucket):
                assert run.start % ALIGNMENT == 0, run
                rows = slice(run.start // ALIGNMENT, -(-run.stop // ALIGNMENT))
                of_rows[:, rows] = torch.tensor(rule, dtype=master.dtype)[:, None]
            factor, decay, eps = of_rows[:, :, None].to(master.device).unbind()
            rounded = parameter if self.rounds and parameter is not master else None
            yield master, *others, rounded, factor if rates else None, decay, eps if epses else None


@cache
def _compiled_update() -> Callable[..., None]:
    return torch.compile(_update_rows, fullgraph=True, dynamic=True)  # for slices of any size


def _update_rows(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    parameter: Tensor | None,
    factor: Tensor | None,
    decay: Tensor,
    eps_factor: Tensor | None,
    numbers: Tensor,
    constants: Tensor,
    cautious: bool,
) -> None:
    """[n] each, factors of rate and eps and decay [n / ALIGNMENT, 1], numbers [5] and constants [5] as unpacked here:
    step_size = lr / (1 - first^t) and root = 1 / sqrt(1 - second^t). `lr` has the schedule of weight decay."""
    lr, step_size, root, scale, skip = numbers.unbind()
    first, rest_of_first, second, rest_of_second, eps = constants.unbind()
    applied = skip == 0
    divided = gradient.to(master.dtype) / scale
    mean = first * exp_avg.to(master.dtype) + rest_of_first * divided
    square = second * exp_avg_sq + rest_of_second * divided * divided
    # The width is a constant here: as that of an argument it would cost a division of 64 bits for each element.
    rows = len(decay), ALIGNMENT
    rate, size = (lr, step_size) if factor is None else (lr * factor, step_size * factor)
    kept = master.view(rows) * (1.0 - rate * decay)
    divisor = (square.sqrt() * root).view(rows) + (eps if eps_factor is None else eps * eps_factor)
    update = mean.view(rows) / divisor
    if cautious:
        update = update * _agreement(mean, divided).view(rows)
    moved = kept - size * update
    updated = torch.where(applied, moved.view(-1), master)
    exp_avg.copy_(torch.where(applied, mean.to(exp_avg.dtype), exp_avg))
    exp_avg_sq.copy_(torch.where(applied, square, exp_avg_sq))
    if parameter is not None:
        parameter.copy_(updated)
    master.copy_(updated)


def _agreement(mean: Tensor, gradient: Tensor) -> Tensor:
    """1 where both have the same sign, else 0. A product of small numbers would be rounded to zero, and a choice by a
    mask takes a CPU five times as long."""
    return mean.sign().mul_(gradient.sign()).clamp_(min=0)

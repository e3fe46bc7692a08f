"""AdamW (Loshchilov and Hutter 2019) over slices of buckets, driven by device tensors alone.

Masters, gradients and both moments are lists of one-dimensional tensors, one per bucket: what this rank owns of it. A
group is a set of runs of elements with one weight decay, and one fused kernel call updates all of them through views
made once. Learning rate, clipping and the decision to skip a step arrive as device tensors, so that nothing waits for
the device; a skipped step leaves masters, moments and the step count bit for bit as they were.

The kernel wants one dtype. Where gradients or the first moment are narrower than the masters, they are widened, updated
and rounded back a piece at a time. The second moment is as wide as the masters: at a beta2 of 0.999 it loses a
thousandth of itself in a step, and the next bf16 number is up to eight thousandths away: it would hardly ever fall.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.layout.buffer_layout import SliceRange
from megalite.optim.fused_update import FusedUpdate

PIECE = 2**18  # elements that a CPU widens at once: their fp32 copies stay in a core's cache
CUDA_PIECE = 2**26  # on CUDA: few enough launches, and 256 MiB for a copy


class _Views(NamedTuple):
    """What one kernel call updates: views that lie at the same places of the four lists."""

    masters: list[Tensor]
    gradients: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]


class FlatAdamW:
    """The optimizer of `masters`, one slice [size] per bucket, fp32 or fp64.

    `gradients` are slices of the same sizes, which every step reads anew; their dtype may be narrower. `groups` are
    (runs, weight_decay), runs that do not overlap; what lies in no run is left alone. State to be saved: `exp_avg` (of
    dtype `first_moment`, default: the masters') and `exp_avg_sq`, like the masters, each list in one block of memory,
    and `step_count` (0-d fp32, exact up to 2^24 steps). `device`: where the steps are counted if there are no masters.
    `before_change` is called before a step changes any of these.

    With `parameters` [size] (the masters themselves, or narrower) a step is compiled, and rounds the masters into them.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        groups: Sequence[tuple[Sequence[SliceRange], float]],
        betas: tuple[float, float],
        eps: float,
        *,
        first_moment: torch.dtype | None = None,
        device: torch.device | None = None,
        parameters: Sequence[Tensor] | None = None,
    ) -> None:
        assert [master.shape for master in masters] == [gradient.shape for gradient in gradients]
        self.masters, self.gradients = list(masters), list(gradients)
        self._betas, self._eps = betas, eps
        dtype, device = (masters[0].dtype, masters[0].device) if masters else (torch.float32, device)
        first_moment, self._dtype = first_moment or dtype, dtype
        sizes = [master.numel() for master in masters]
        self.exp_avg = list(torch.zeros(sum(sizes), dtype=first_moment, device=device).split(sizes))
        self.exp_avg_sq = list(torch.zeros(sum(sizes), dtype=dtype, device=device).split(sizes))
        self.step_count = torch.zeros((), dtype=torch.float32, device=device)
        self.before_change: Callable[[], None] = lambda: None
        self._widened = first_moment != dtype or any(gradient.dtype != dtype for gradient in gradients)
        self._fused: FusedUpdate | None = None
        if parameters is not None:
            lists = (self.masters, self.gradients, self.exp_avg, self.exp_avg_sq)
            self._fused = FusedUpdate(*lists, parameters, groups)
            return
        self._calls = [(views, decay) for runs, decay in groups for views in self._views(runs)]

    @property
    def rounds(self) -> bool:
        """Whether a step leaves the parameters as the masters, rounded."""
        return self._fused is not None

    @torch.no_grad()
    def step(self, lr: Tensor, *, gradient_scale: Tensor, skip: Tensor) -> None:
        """One step with the gradients divided by `gradient_scale` (0-d), or none where `skip` (0-d) is 1.0.

        The gradients are used up: they may hold the divided ones afterwards.
        """
        self.before_change()
        skip = skip.to(torch.float32)
        self.step_count += 1.0 - skip
        if self._fused is not None:
            self._fused.step(self.step_count, lr, gradient_scale, skip, self._betas, self._eps)
            return
        # CUDA's kernel reads the rate as fp32, in fp64 too; the CPU's takes it as it is.
        lr = lr.to(torch.float32) if lr.is_cuda else lr
        scale = gradient_scale.to(self._dtype)
        for views, weight_decay in self._calls:
            if not self._widened:
                self._update(views, lr, scale, skip, weight_decay)
                continue
            # The same kernel on copies in the masters' dtype; a skipped one rounds back to the bits that it came from.
            gradients, exp_avg = (
                [tensor.to(self._dtype) for tensor in each] for each in (views.gradients, views.exp_avg)
            )
            wide = views._replace(gradients=gradients, exp_avg=exp_avg)
            self._update(wide, lr, scale, skip, weight_decay)
            if exp_avg[0] is not views.exp_avg[0]:  # else they are the moments themselves
                torch._foreach_copy_(views.exp_avg, exp_avg)

    def _views(self, runs: Sequence[SliceRange]) -> Iterator[_Views]:
        """The views of one group, for one kernel call; or, to be widened, of one piece at a time."""
        tensors = (self.masters, self.gradients, self.exp_avg, self.exp_avg_sq)
        size = CUDA_PIECE if self.step_count.is_cuda else PIECE
        runs = [run for run in runs if run.start < run.stop]
        for part in [[piece] for run in runs for piece in _pieces(run, size)] if self._widened else [runs]:
            if part:
                yield _Views(*([slices[run.bucket][run.start : run.stop] for run in part] for slices in tensors))

    def _update(self, views: _Views, lr: Tensor, scale: Tensor, skip: Tensor, weight_decay: float) -> None:
        exact = self._dtype == torch.float64  # the kernel would round the scale to fp32
        if exact:
            torch._foreach_div_(views.gradients, scale)
        torch._fused_adamw_(
            *views,
            [],
            [self.step_count] * len(views.masters),  # only read: one count serves all
            lr=lr,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if exact else scale,
            found_inf=skip,
        )


def _pieces(run: SliceRange, size: int) -> Iterator[SliceRange]:
    for start in range(run.start, run.stop, size):
        yield SliceRange(run.bucket, start, min(start + size, run.stop))

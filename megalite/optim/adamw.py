"""AdamW (Loshchilov and Hutter 2019) over flat buffers, driven by device tensors alone.

Masters, both moments and gradients are one-dimensional tensors of the same layout; a group is a range of them with its
weight decay. Learning rate, clipping and the decision to skip a step arrive as device tensors, so that nothing waits
for the device; a skipped step leaves masters, moments and the step count bit for bit as they were.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class FlatAdamW:
    """The optimizer of `masters` [size], fp32 or fp64.

    `groups` are (start, end, weight_decay) ranges; what lies in none of them is left alone. State to be saved:
    `exp_avg` and `exp_avg_sq` (both like masters) and `step_count` (0-d fp32, exact up to 2^24 steps).
    """

    def __init__(
        self, masters: Tensor, groups: Sequence[tuple[int, int, float]], betas: tuple[float, float], eps: float
    ) -> None:
        assert masters.dim() == 1
        assert masters.dtype in (torch.float32, torch.float64)
        self.masters = masters
        self.exp_avg = torch.zeros_like(masters)
        self.exp_avg_sq = torch.zeros_like(masters)
        self.step_count = torch.zeros((), dtype=torch.float32, device=masters.device)
        self._groups = [(slice(start, end), weight_decay) for start, end, weight_decay in groups if start < end]
        self._betas = betas
        self._eps = eps

    @torch.no_grad()
    def step(self, gradients: Tensor, lr: Tensor, *, gradient_scale: Tensor, skip: Tensor) -> None:
        """One step with `gradients` [size] divided by `gradient_scale` (0-d), or none where `skip` (0-d) is 1.0.

        The gradients are used up: they may hold the divided ones afterwards.
        """
        skip = skip.to(torch.float32)
        self.step_count += 1.0 - skip
        update = self._update_plain if self.masters.dtype == torch.float64 else self._update_fused
        for elements, weight_decay in self._groups:
            update(elements, gradients[elements], lr, gradient_scale, skip, weight_decay)

    def _update_fused(
        self, elements: slice, gradients: Tensor, lr: Tensor, gradient_scale: Tensor, skip: Tensor, weight_decay: float
    ) -> None:
        """One kernel reads each element once; it wants lr, scale and skip in fp32 and counts steps from 1."""
        torch._fused_adamw_(
            [self.masters[elements]],
            [gradients],
            [self.exp_avg[elements]],
            [self.exp_avg_sq[elements]],
            [],
            [self.step_count],
            lr=lr.to(torch.float32),
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            grad_scale=gradient_scale.to(torch.float32),
            found_inf=skip,
        )

    def _update_plain(
        self, elements: slice, gradients: Tensor, lr: Tensor, gradient_scale: Tensor, skip: Tensor, weight_decay: float
    ) -> None:
        """The definition, for fp64: the fused kernels would round lr and scale to fp32."""
        (beta1, beta2), applied = self._betas, skip == 0
        master, exp_avg, exp_avg_sq = self.masters[elements], self.exp_avg[elements], self.exp_avg_sq[elements]
        gradient = gradients / gradient_scale
        first = torch.lerp(exp_avg, gradient, 1 - beta1)
        second = torch.lerp(exp_avg_sq, gradient.square(), 1 - beta2)
        steps = self.step_count.double()
        first_unbiased = first / (1 - beta1**steps)
        second_unbiased = second / (1 - beta2**steps)
        decayed = master * (1 - lr * weight_decay)
        updated = decayed - lr * first_unbiased / (second_unbiased.sqrt() + self._eps)
        for kept, new in ((master, updated), (exp_avg, first), (exp_avg_sq, second)):
            kept.copy_(torch.where(applied, new, kept))

"""The experts of one layer that a rank holds: an MLP each, computed for all of them at once.

A token's weight multiplies what goes into the second product, which is linear: so no output row is kept for the
weight's gradient. Backward computes the activation again from the first product, and with `recompute` that one too.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.config.schema import MoEConfig
from megalite.kernels.embed import main_grad_of
from megalite.kernels.grouped import RowGroups, add_grouped_transposed_products, grouped_product
from megalite.moe.dispatch import ExpertRanks
from megalite.tensor_parallel.layers import TpContext

Activation = Callable[[Tensor], Tensor]


class Experts(nn.Module):
    """This rank's experts, each a piece of the width where etp ranks share one. `inner`: name and outputs of the first
    matrix, [2, width] of a gated activation and [width] of a plain one. Weights are [local experts, *outputs, inputs],
    without values."""

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        inner: tuple[str, tuple[int, ...]],
        activation: Activation,
        ranks: ExpertRanks,
        place: TpContext,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.inner, (*gates, width) = inner
        self.activation, self.deferred, self.recompute, self.compiled = activation, place.deferred, recompute, False
        local, width = config.num_experts // ranks.ep, width // ranks.etp
        shapes = {self.inner: (local, *gates, width, hidden_size), "down": (local, hidden_size, width)}
        for name, shape in shapes.items():
            self.add_module(name, nn.ParameterDict({"weight": place.parameter(*shape)}))

    def forward(self, rows: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
        """weights [m] * down(activation(inner rows)) of each row's expert: rows [m, h] -> [m, h], where etp ranks share
        experts a term of the sum. Rows of no expert give 0 and have no gradient, or nobody reads what they give."""
        inner, down = (self.get_parameter(f"{name}.weight") for name in (self.inner, "down"))
        return _ExpertMLP.apply(rows, weights, inner, down, groups, self)  # type: ignore[no-any-return]


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, inner: Tensor, down: Tensor, groups: RowGroups, experts: Experts
    ) -> Tensor:
        before = grouped_product(rows, inner.flatten(1, -2).mT, groups)
        ctx.save_for_backward(rows, weights, inner, down, *([] if experts.recompute else [before]))
        ctx.groups, ctx.experts, ctx.main_grads = groups, experts, (main_grad_of(inner), main_grad_of(down))
        ctx.passes = _compiled_passes() if experts.compiled else (_scaled, _scaled_backward)
        scaled = ctx.passes[0](experts.activation, before, weights)
        return groups.clear_rest(grouped_product(scaled, down.mT, groups))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, inner, down, *kept = ctx.saved_tensors
        groups: RowGroups = ctx.groups
        experts: Experts = ctx.experts
        (grad,), pass_back = grads, ctx.passes[1]
        before = kept[0] if kept else grouped_product(rows, inner.flatten(1, -2).mT, groups)
        scaled_grad = grouped_product(grad, down, groups)  # [m, width]
        used = groups.ends[-1] if groups.on_host is None else None
        before_grad, weights_grad, scaled = pass_back(experts.activation, before, weights, scaled_grad, used)
        del before, scaled_grad
        weights_grad = groups.clear_rest(weights_grad)
        rows_grad = groups.clear_rest(grouped_product(before_grad, inner.flatten(1, -2), groups))
        factors = ((before_grad, rows.detach()), (grad, scaled))
        weight_grads: list[Tensor | None] = []
        for weight, main_grad, (left, right) in zip((inner, down), ctx.main_grads, factors, strict=True):
            total = torch.zeros_like(weight) if main_grad is None else main_grad
            flat = total.view(len(weight), -1, weight.shape[-1])
            work = partial(add_grouped_transposed_products, flat, left, right, groups)
            if main_grad is not None and experts.deferred is not None:
                experts.deferred.put(work)
            else:
                work()
            weight_grads.append(total if main_grad is None else None)
        return rows_grad, weights_grad, *weight_grads, None, None


@cache
def _compiled_passes() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """On CUDA one kernel each. A number of rows that differs from step to step is compiled twice; beyond the compiler's
    limit of variants they run as they are. That limit is one for all partial functions: do not compile one."""
    return torch.compile(_scaled), torch.compile(_scaled_backward)


def _scaled(activation: Activation, before: Tensor, weights: Tensor) -> Tensor:
    """activation(before) [m, width] times the weight of each row [m]."""
    return activation(before) * weights.to(before.dtype).unsqueeze(1)


def _scaled_backward(
    activation: Activation, before: Tensor, weights: Tensor, scaled_grad: Tensor, used: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `before` and, in the router's precision, of `weights`, and what `_scaled` made; `scaled_grad`, the
    gradient of that, is written over. Rows from `used` (0-d) on may hold anything: their weights have gradient 0."""
    scale = weights.to(before.dtype).unsqueeze(1)
    activated, pull = _differentiated(activation, before)
    weights_grad = scaled_grad.to(weights.dtype, copy=True).mul_(activated).sum(1)
    if used is not None:
        weights_grad = torch.where(torch.arange(len(weights), device=weights.device) < used, weights_grad, 0.0)
    (before_grad,) = pull(scaled_grad.mul_(scale))
    return before_grad, weights_grad, activated * scale


def _differentiated(activation: Activation, x: Tensor) -> Any:
    """activation(x), and the function from the gradient of that to (gradient of x,)."""
    if torch.compiler.is_compiling():
        return torch.func.vjp(activation, x)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = activation(x)
    return y.detach(), partial(torch.autograd.grad, y, x)

"""The experts of one layer that a rank holds: an MLP each, computed for all of them at once.

A token's weight multiplies what goes into the second product, which is linear: so no output row is kept for the
weight's gradient. Backward computes the activation again from the first product, and with `recompute` that one too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.kernels.grouped import RowGroups, add_grouped_transposed_products, grouped_product
from megalite.tensor_parallel.deferred import DeferredWork

Activation = Callable[[Tensor], Tensor]


class ExpertMatrix(nn.Module):
    """One matrix of each local expert: weight [experts, *outputs, inputs], without values.

    `main_grad`: None, or a tensor of its size to which backward adds the gradient (fp32, fp64 in fp64).
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.main_grad: Tensor | None = None


def expert_mlp(
    rows: Tensor,
    weights: Tensor,
    groups: RowGroups,
    inner: ExpertMatrix,
    down: ExpertMatrix,
    activation: Activation,
    *,
    deferred: DeferredWork | None = None,
    recompute: bool = False,
) -> Tensor:
    """weights [m] * down(activation(inner rows)) of each row's expert: rows [m, h] -> [m, h]. Rows of no expert give 0
    and have no gradient; what is computed of them in between is of no use and goes nowhere.

    `inner` maps h to what `activation` makes the experts' local width of. Under a split over etp that is a part of the
    width, and the output a term of the sum. `deferred` takes weight gradients that a backward puts off.
    """
    main_grads = inner.main_grad, down.main_grad
    return _ExpertMLP.apply(  # type: ignore[no-any-return]
        rows, weights, inner.weight, down.weight, groups, activation, main_grads, deferred, recompute
    )


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        inner: Tensor,
        down: Tensor,
        groups: RowGroups,
        activation: Activation,
        main_grads: tuple[Tensor | None, Tensor | None],
        deferred: DeferredWork | None,
        recompute: bool,
    ) -> Tensor:
        before = _first_product(rows, inner, groups)
        ctx.save_for_backward(rows, weights, inner, down, *([] if recompute else [before]))
        ctx.groups, ctx.activation, ctx.main_grads, ctx.deferred = groups, activation, main_grads, deferred
        scaled = activation(before) * weights.to(rows.dtype).unsqueeze(1)
        return groups.clear_rest(grouped_product(scaled, down.transpose(1, 2), groups))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, inner, down, *kept = ctx.saved_tensors
        groups: RowGroups = ctx.groups
        (grad,) = grads
        scale = weights.to(rows.dtype).unsqueeze(1)
        before = kept[0] if kept else _first_product(rows, inner, groups)
        with torch.enable_grad():
            before = before.detach().requires_grad_()
            activated = ctx.activation(before)
        scaled_grad = grouped_product(grad, down, groups)  # [m, width]
        # The router's: in its precision.
        in_full = scaled_grad.to(weights.dtype, copy=True).mul_(activated.detach())
        weights_grad = groups.clear_rest(in_full.sum(1))
        del in_full  # it is the largest of all
        (before_grad,) = torch.autograd.grad(activated, before, scaled_grad.mul_(scale))
        del scaled_grad
        rows_grad = groups.clear_rest(grouped_product(before_grad, inner.flatten(1, -2), groups))
        scaled = activated.detach() * scale
        factors = ((before_grad, rows.detach()), (grad, scaled))
        weight_grads: list[Tensor | None] = [None, None]
        for at, (weight, main_grad, (left, right)) in enumerate(
            zip((inner, down), ctx.main_grads, factors, strict=True)
        ):
            total = torch.zeros_like(weight) if main_grad is None else main_grad
            flat = total.view(len(weight), -1, weight.shape[-1])
            if main_grad is not None and ctx.deferred is not None:
                ctx.deferred.put(_work(flat, left, right, groups))
            else:
                add_grouped_transposed_products(flat, left, right, groups)
            weight_grads[at] = total if main_grad is None else None
        return rows_grad, weights_grad, *weight_grads, None, None, None, None, None


def _first_product(rows: Tensor, inner: Tensor, groups: RowGroups) -> Tensor:
    return grouped_product(rows, inner.flatten(1, -2).transpose(1, 2), groups)


def _work(total: Tensor, left: Tensor, right: Tensor, groups: RowGroups) -> Callable[[], None]:
    return lambda: add_grouped_transposed_products(total, left, right, groups)

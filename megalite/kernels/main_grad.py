"""A small parameter whose gradient goes into its main gradient: compiled, in the very pass that sums it up."""

from typing import Any

import torch
from torch import Tensor


def with_main_grad(parameter: Tensor, main_grad: Tensor | None) -> Tensor:
    """The parameter. Backward adds its gradient to `main_grad` (of its shape; fp32, fp64 in fp64), and autograd sees
    none; without one it is autograd's."""
    return parameter if main_grad is None else _WithMainGrad.apply(parameter, main_grad)


class _WithMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.main_grad.add_(grads[0].to(ctx.main_grad.dtype))
        return None, None

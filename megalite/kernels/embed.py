"""Main gradients, and the parameters that meet them outside of products: tables that are looked up, small vectors.

Layers whose parameters have a main gradient (fp32, fp64 in fp64) add to it in backward, the head in the forward of the
loss, and autograd sees no gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def set_main_grad(parameter: nn.Parameter, main_grad: Tensor, name: str) -> None:
    """From now on layers add the gradient of the parameter of this name to the given tensor of its shape."""
    if name.endswith("weight") and main_grad.dim() > 1:  # [outputs, inputs], as the product that is added
        main_grad = main_grad.view(-1, main_grad.shape[-1])
    setattr(parameter, "main_grad", main_grad)  # noqa: B010


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """The main gradient of a parameter, of a weight [outputs, inputs]; None: its gradient is autograd's."""
    return getattr(parameter, "main_grad", None)


def embed(tokens: Tensor, weight: Tensor, main_grad: Tensor | None) -> Tensor:
    """Rows of weight [rows, h]: tokens [...] -> [..., h]. With a `main_grad` [rows, h] autograd sees no gradient."""
    if main_grad is None and not weight.is_cuda:
        return F.embedding(tokens, weight)
    return _Embedding.apply(tokens, weight, main_grad)  # type: ignore[no-any-return]


class _Embedding(torch.autograd.Function):
    """Autograd's own gradient is a dense tensor of the table's size per microbatch, in its dtype, and CUDA's additions
    come in any order. The main gradient receives the rows of the batch's tokens in its own dtype; nothing else is
    touched."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, main_grad: Tensor | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.main_grad, ctx.rows = main_grad, len(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None]:
        (tokens,), main_grad, grad = ctx.saved_tensors, ctx.main_grad, grads[0].flatten(0, -2)
        total = grad.new_zeros(ctx.rows, grad.shape[1]) if main_grad is None else main_grad
        add_rows(total, tokens.flatten(), grad.to(total.dtype))
        return None, total if main_grad is None else None, None


def add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """total[rows[i]] += values[i] for all i, in one order: total [V, h], rows [n], values [n, h].

    On CUDA index_put_ sorts where it accumulates, index_add_ is atomics in any order; on a CPU index_add_ is in order.
    """
    if total.is_cuda:
        total.index_put_((rows,), values, accumulate=True)
    else:
        total.index_add_(0, rows, values)


def with_main_grad(parameter: Tensor) -> Tensor:
    """The parameter, whose gradient backward adds to its main gradient, if it has one."""
    main_grad = main_grad_of(parameter)
    return parameter if main_grad is None else _WithMainGrad.apply(parameter, main_grad)


class _WithMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        total, grad = ctx.main_grad, grads[0]
        # The sum of two dtypes is one kernel on CUDA and in compiled code, and slow on CPUs.
        total.add_(grad if total.is_cuda else grad.to(total.dtype))
        return None, None

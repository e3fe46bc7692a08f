"""The one function through which all matrix products of the model go.

The seam where tensor parallelism, a main gradient and fp8 enter: whoever changes how the model multiplies changes it
here. Without a group and a main gradient it is torch's own product, nothing around it. Otherwise backward runs in an
order in which communication overlaps with products:

    input copied      x.grad of this rank | start sum | weight gradient                        | finish sum
    input a sequence  start gather of x | x.grad of this rank | start reduce-scatter | finish gather | weight gradient
                                                                                     | finish reduce-scatter

A compiled backward keeps that order under the options of inductor that model/gpt.py sets (OVERLAPPED) only.

Where weight gradients are deferred, backward has the first two steps and the last alone; this rank's x is gathered only
when the weight's gradient is computed: as often as without.
Sources: Shoeybi et al. 2019 (arXiv 1909.08053), section 3; Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.kernels.fp8 import Recipe, fp8_input_gradient, fp8_linear, fp8_weight_gradient
from megalite.kernels.products import add_transposed_product, compiled_add_transposed_product, statistics_dtype
from megalite.tensor_parallel.collectives import (
    TensorGroup,
    finish,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megalite.tensor_parallel.deferred import DeferredWork

PARTIAL_SUMS = 32  # of a gradient's rows: enough columns for all of a GPU, read at its full speed


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: TensorGroup | None = None,
    sequence_parallel: bool = False,
    main_grad: Tensor | None = None,
    deferred: DeferredWork | None = None,
    fp8: Recipe | None = None,
    before_activation: bool = False,
) -> Tensor:
    """x [..., k] times the transpose of weight [n, k], plus bias [n] -> [..., n].

    `group`: the ranks among which the outputs are split; x is the same on all of them and its gradient is summed over
    them. With `sequence_parallel` x is the rank's part of the sequence, [s/t, ..., k] -> [s, ..., n]: gathered, in
    backward once more, and its gradient reduce-scattered.

    Backward adds the weight's gradient to `main_grad` (fp32, fp64 in fp64; contiguous, of the weight's size, compiled
    [n, k]), and autograd sees none; a backward that `deferred` collects puts that off (compiled, there must be none).
    `fp8`: how the product and its gradients round what they multiply (kernels/fp8.py).
    `before_activation`: the gradient of the output comes from an element-wise pass.
    """
    assert group is not None or not sequence_parallel
    if group is None and main_grad is None and fp8 is None:
        return F.linear(x, weight, bias)
    options = group, sequence_parallel, main_grad, deferred, fp8, before_activation
    return _Linear.apply(x, weight, bias, *options)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """Saves this rank's x and the weight, nothing that was gathered."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: TensorGroup | None,
        sequence_parallel: bool,
        main_grad: Tensor | None,
        deferred: DeferredWork | None,
        fp8: Recipe | None,
        before_activation: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence_parallel, ctx.main_grad, ctx.deferred = group, sequence_parallel, main_grad, deferred
        ctx.fp8, ctx.before_activation = fp8, before_activation
        if group is not None and sequence_parallel:
            x = finish(start_all_gather(x, group))
        return F.linear(x, weight, bias) if fp8 is None else fp8_linear(x, weight, bias, fp8.scales)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        group: TensorGroup | None = ctx.group
        gathering = group if ctx.sequence_parallel and wants_weight else None
        x_grad = weight_grad = bias_grad = None
        weight_gradient = partial(_weight_gradient, grad, main_grad=ctx.main_grad, fp8=ctx.fp8)

        if wants_weight and ctx.main_grad is not None and ctx.deferred is not None and ctx.deferred.active:
            _put_off(ctx.deferred, weight_gradient, x.detach(), gathering)  # x itself would hold its graph
            wants_weight, gathering = False, None

        if gathering is not None:
            x = start_all_gather(_copy_after(x, grad) if torch.compiler.is_compiling() else x, gathering)
        if wants_x:
            x_grad = torch.matmul(grad, weight) if ctx.fp8 is None else fp8_input_gradient(grad, weight, ctx.fp8.scales)
            if group is not None:
                x_grad = (start_reduce_scatter if ctx.sequence_parallel else start_all_reduce)(x_grad, group)
        if gathering is not None:
            x = finish(x)
        if wants_weight:
            weight_grad = weight_gradient(x)
        if wants_bias:
            bias_grad = _bias_gradient(grad, before_activation=ctx.before_activation)
        if x_grad is not None and group is not None:
            x_grad = finish(x_grad)
        return x_grad, weight_grad, bias_grad, None, None, None, None, None, None


def _put_off(deferred: DeferredWork, add: Callable[[Tensor], Any], x: Tensor, gathering: TensorGroup | None) -> None:
    """`add`, which computes and adds the weight's gradient, is called later with x, gathered from this rank's."""
    if gathering is None:
        deferred.put(lambda: add(x))
        return
    gathered: list[Tensor] = []
    deferred.put(
        work=lambda: add(finish(gathered.pop())),
        begin=lambda: gathered.append(start_all_gather(x, gathering)),
    )


def _weight_gradient(grad: Tensor, x: Tensor, main_grad: Tensor | None, fp8: Recipe | None) -> Tensor | None:
    """grad^T x for grad [..., n], x [..., k]: returned, or added to the main gradient."""
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    product = fp8_weight_gradient(grad, x, fp8.scales) if fp8 is not None and fp8.weight_gradients else None
    if main_grad is None:
        return torch.mm(grad.t(), x) if product is None else product.to(grad.dtype)
    shape, add = (grad.shape[1], x.shape[1]), add_transposed_product
    if torch.compiler.is_compiling():
        assert main_grad.shape == shape, "compiled by torch 2.11, a change to a view goes to the wrong place"
        add = compiled_add_transposed_product
    else:
        main_grad = main_grad.view(shape)
    if product is None:
        add(main_grad, grad, x)
    else:
        main_grad.add_(product)
    return None


def _bias_gradient(grad: Tensor, *, before_activation: bool) -> Tensor:
    """The sum over all but the last dim of grad [..., n], for example [s, b, n]."""
    rows = grad.flatten(0, -2)
    if before_activation and torch.compiler.is_compiling() and len(rows) % PARTIAL_SUMS == 0:
        partial_sums = rows.view(-1, PARTIAL_SUMS, rows.shape[1]).sum(0, dtype=statistics_dtype(grad.dtype))
        return partial_sums.sum(0).to(grad.dtype)
    return rows.sum(0)


def activated(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """activation(x) of the product x [s, b, n], computed in a shape whose gradient inductor writes and sums, for the
    product's bias, in one pass."""
    rows = x.flatten(0, 1)
    if not torch.compiler.is_compiling() or len(rows) % PARTIAL_SUMS:
        return activation(x)
    return activation(rows.view(-1, PARTIAL_SUMS, rows.shape[1])).view(*x.shape[:2], -1)


@torch.library.custom_op("megalite::copy_after", mutates_args=())
def _copy_after(x: Tensor, grad: Tensor) -> Tensor:
    """A copy of x that a compiler cannot make before it has `grad`.

    Without it the compiler merges backward's gather of x with forward's, and stores what was gathered.
    """
    return x.clone(memory_format=torch.contiguous_format)


@_copy_after.register_fake
def _(x: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)

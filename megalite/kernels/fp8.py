"""Matrix products of numbers that are rounded to eight bits, twice as fast as bf16's on the GPUs that have them.

A matrix is divided by a scale and rounded to a float8 dtype; the product of two such matrices is summed in fp32 and
multiplied by both scales. The scale follows from the largest number that is there now (dynamic scaling), one of the
whole matrix (tensorwise) or one for each row of what is summed over (rowwise). It is a power of two, so that dividing
and multiplying by it is exact: numbers that are not tiny beside the largest round alike whatever the scale, hence on
all layouts, and a CPU gets the products of a GPU out of products in the model's own dtype.

Nothing is clipped. The largest number stays within the dtype by the choice of the scale; an infinity makes the scale
infinite and becomes NaN, a NaN stays one, and what is multiplied by it is NaN: the step is found to be bad.
Sources: Micikevicius et al. 2022 (arXiv 2209.05433); torchao's recipes `tensorwise` and `rowwise_with_gw_hp`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.products import statistics_dtype

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2  # 3 bits of mantissa up to 448, 2 bits up to 57344
OF_GRADIENTS = {"tensorwise": E5M2, "rowwise": E4M3}  # one scale for all tokens needs the wider range
# Gradients are divided by all tokens of a step: far below it, and its inverse is still a number of fp32.
LEAST_SCALE = 2.0**-100
MANTISSA = (1 << 23) - 1  # bits of fp32


@dataclass(frozen=True)
class Recipe:
    """Which numbers share a scale ("tensorwise" or "rowwise"), and whether weight gradients are fp8 products too."""

    scales: str
    weight_gradients: bool = False


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str) -> Tensor:
    """x [..., k] times the transpose of weight [n, k], plus bias [n] -> [..., n], in the dtype of x."""
    return _product(x, E4M3, weight, bias, recipe, fast=True)


def fp8_input_gradient(grad: Tensor, weight: Tensor, recipe: str) -> Tensor:
    """grad [..., n] times weight [n, k] -> [..., k], in the dtype of grad."""
    return _product(grad, OF_GRADIENTS[recipe], weight.t(), None, recipe, fast=False)


def fp8_weight_gradient(grad: Tensor, x: Tensor, recipe: str) -> Tensor:
    """The transpose of grad [m, n] times x [m, k] -> [n, k], not rounded: fp32, or fp64 of fp64.

    x is rounded as in forward. The sum is over rows, so that their scales go into the other factor. That has one scale
    and e5m2, the wider range: only so does every GPU that multiplies fp8 give fp32 products.
    """
    rows, scale = rounded(x, E4M3, recipe)
    right = _transposed(rows.view(torch.uint8), None, E4M3)
    if recipe == "tensorwise":
        columns, grad_scale = rounded(grad, E5M2, recipe)
        left = _transposed(columns.view(torch.uint8), None, E5M2)
    else:
        grad_scale = scale_of(grad * scale, E5M2, "tensorwise")
        left, scale = _transposed(grad, grad_scale / scale, E5M2), torch.ones_like(grad_scale)
    dtype = statistics_dtype(x.dtype)
    if grad.is_cuda:
        return torch._scaled_mm(left, right.t(), grad_scale, scale, out_dtype=dtype)
    return torch.mm(left.to(dtype) * grad_scale.to(dtype), right.t().to(dtype) * scale.to(dtype))


def rounded(x: Tensor, dtype: torch.dtype, recipe: str) -> tuple[Tensor, Tensor]:
    """x [m, k] divided by its scale and rounded to a float8 dtype, row by row in memory; and the scale."""
    scale = scale_of(x, dtype, recipe)
    return (x / scale).to(dtype).contiguous(), scale


def scale_of(x: Tensor, dtype: torch.dtype, recipe: str) -> Tensor:
    """The scale of x [m, k], fp32: [m, 1] of the rows or [1, 1]."""
    largest = x.abs().amax(-1, keepdim=True).float()  # first of rows, in the pass that writes them
    if recipe == "tensorwise":
        largest = largest.amax(0, keepdim=True)
    least = (largest / torch.finfo(dtype).max).clamp(min=LEAST_SCALE)
    return ((least.view(torch.int32) + MANTISSA) & ~MANTISSA).view(torch.float32)  # up to a power of two


@torch.library.custom_op("megalite::transposed", mutates_args=())
def _transposed(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The transpose of x [m, k], row by row in memory: [k, m], divided by scale [m, 1] and rounded; without a scale x
    is the bytes of numbers of the dtype."""
    if not x.is_cuda:
        bits = x.view(dtype) if scale is None else (x.to(scale.dtype) / scale).to(dtype)
        return bits.t().clone(memory_format=torch.contiguous_format)
    from megalite.kernels.transposed import transposed  # imports triton

    return transposed(x, scale, dtype)


@_transposed.register_fake
def _(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0], dtype=dtype)


def _product(
    left: Tensor, left_dtype: torch.dtype, right: Tensor, bias: Tensor | None, recipe: str, *, fast: bool
) -> Tensor:
    """left [..., k] times the transpose of right [n, k]. `fast`: CUDA keeps fewer bits of partial sums, as is usual in
    forward."""
    rows, left_scale = rounded(left.flatten(0, -2), left_dtype, recipe)
    columns, right_scale = rounded(right, E4M3, recipe)
    dtype = left.dtype
    if left.is_cuda:
        scales = left_scale, right_scale.t()
        out = torch._scaled_mm(rows, columns.t(), *scales, bias=bias, out_dtype=dtype, use_fast_accum=fast)
    else:  # torch 2.11 has no rowwise product for it
        out = F.linear(rows.to(dtype) * left_scale.to(dtype), columns.to(dtype) * right_scale.to(dtype), bias)
    return out.view(*left.shape[:-1], right.shape[0])

"""Products of two precisions: a weight's gradient that is added to its fp32 main gradient, and a bf16 input with an
fp32 weight."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of a product that is rounded at once, on a CPU: many, as each product packs `right` anew, yet few enough to
# be a small part of the gradients. The largest weight of GPT-2's smallest blocks (2,359,296) is one tile.
TILE_ELEMENTS = 5 << 19
SMALL = 1 << 19  # elements of a total that stays in the caches: whole, a mixed sum takes a third of the pieces' time
CACHED_ELEMENTS = 1 << 16  # per thread: 256 KiB in fp32 stay in the caches


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, norms, losses and tables for activations of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_transposed_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [v, h] += left^T right for left [c, v], right [c, h]; total may be of wider dtype than the product's."""
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
    elif total.is_cuda:
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    elif total.numel() <= SMALL:
        total.add_(torch.mm(left.t(), right))
    else:
        # No CPU kernel multiplies bf16 into fp32, and mixed sums beyond the caches are slow: product, then widened
        # copies and sums.
        tiles = -(-total.numel() // TILE_ELEMENTS)
        rows = -(-total.shape[0] // tiles)  # as many in all tiles: a short one is slow
        piece = max(1, CACHED_ELEMENTS * torch.get_num_threads() // total.shape[1])
        memory = right.new_empty(rows, total.shape[1])
        for tile, columns in zip(total.split(rows), left.split(rows, dim=1), strict=True):
            product = torch.mm(columns.t(), right, out=memory[: len(tile)])
            for part, of_product in zip(tile.split(piece), product.split(piece), strict=True):
                part.add_(of_product.to(total.dtype))


# A compiler would take the sum apart: a new tensor of the weight's size, then a copy. An op of our own stays in place.
compiled_add_transposed_product = torch.library.custom_op(
    "megalite::add_transposed_product", add_transposed_product, mutates_args=("total",)
)


def wide_product(x: Tensor, weight: Tensor, *, compiled: bool = False) -> Tensor:
    """x [t, h] times the transpose of weight [E, h], in the weight's precision: [t, E]. `compiled`: a compiler may join
    the passes that take numbers apart."""
    return _WideProduct.apply(x, weight, compiled)  # type: ignore[no-any-return]


class _WideProduct(torch.autograd.Function):
    """Backward is kept x as it came: half the size in bf16, and nothing where a norm is computed again.

    On CUDA bf16 products are many times as fast as fp32's, and three bf16 terms make an fp32 number. Output and weight
    gradient differ from fp32's in the order of additions alone. The gradient of x, which is rounded to bf16, takes two
    terms of both factors without the product of the smaller ones: each summand lacks less than 2^-14 of itself.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.passes = _compiled_passes() if compiled else (_forward_terms, _backward_terms)
        if not _takes_terms(x, weight):
            return F.linear(x.to(weight.dtype), weight)
        of_terms = _product(x, ctx.passes[0](weight).t(), weight.dtype)
        return of_terms.unflatten(1, (3, -1)).sum(1)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        if not _takes_terms(x, weight):
            return (grad @ weight).to(x.dtype), grad.t() @ x.to(weight.dtype), None
        of_grad, of_weight = ctx.passes[1](grad, weight)
        outputs = len(weight)
        x_grad = _product(of_grad[:, outputs:], of_weight, x.dtype)
        weight_grad = _product(of_grad[:, : 3 * outputs].t(), x, weight.dtype).unflatten(0, (3, -1)).sum(0)
        return x_grad, weight_grad, None


def _takes_terms(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and (x.dtype, weight.dtype) == (torch.bfloat16, torch.float32)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of bf16 matrices, with sums in fp32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return (left.float() @ right.float()).to(dtype)


def _forward_terms(weight: Tensor) -> Tensor:
    """[E, h] -> [3 E, h]"""
    return torch.cat(_bf16_terms(weight)).bfloat16()


def _backward_terms(grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The terms of grad [t, E], the first twice: [t, 4 E]; and what the last three of these multiply: [3 E, h]."""
    third, second, first = _bf16_terms(grad)
    _, of_second, of_first = _bf16_terms(weight)
    of_grad, of_weight = (third, second, first, first), (of_first, of_second, of_first)
    return torch.cat(of_grad, 1).bfloat16(), torch.cat(of_weight).bfloat16()


def _bf16_terms(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of bf16 (kept in fp32) whose sum is x: third, second, first. Numbers below 2^-110, where bf16 loses bits,
    are right to 2^-134. A number that is not finite, or beyond bf16's largest, has a term that is not finite."""
    first = _rounded(x)
    second = _rounded(x - first)
    return x - first - second, second, first


def _rounded(x: Tensor) -> Tensor:
    """To bf16's 8 bits. Not by a cast there and back, which a compiler leaves out."""
    return ((x.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)


@cache
def _compiled_passes() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return torch.compile(_forward_terms), torch.compile(_backward_terms)

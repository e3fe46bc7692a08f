"""Products of two precisions: a weight's gradient that is added to its fp32 main gradient, and a bf16 input with an
fp32 weight."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

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


def wide_product(x: Tensor, weight: Tensor, *, by_terms: bool = False) -> Tensor:
    """x [t, h] times the transpose of weight [E, h], in the weight's precision: [t, E]. `by_terms`: a bf16 x is
    multiplied with an fp32 weight on a GPU's tensor units."""
    by_terms = by_terms and (x.dtype, weight.dtype) == (torch.bfloat16, torch.float32)
    return (_ProductByTerms if by_terms else _WideProduct).apply(x, weight)  # type: ignore[no-any-return]


class _WideProduct(torch.autograd.Function):
    """Saves x as it came: half the size in bf16, and no memory of its own where a norm is computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.to(weight.dtype), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        return (grad @ weight).to(x.dtype), grad.t() @ x.to(weight.dtype)


class _ProductByTerms(torch.autograd.Function):
    """The same by products of bf16 numbers, which are exact in fp32, and sums in fp32.

    An fp32 number is the sum of three bf16 numbers: the first is the number rounded, the second, at most 2^-8 of it,
    what is left, rounded, and the third, at most 2^-16, the rest. x is bf16, so that output and weight gradient lack
    nothing but what sums round, as in fp32. The gradient of x has the six products of two terms that are not below
    2^-16. The three others are below 2^-22 together, the rounding of one or two additions in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        of_terms = _product(x, _compiled_terms()(weight, 0, (2, 1, 0)).t(), weight.dtype)  # [t, 3 E]
        return of_terms.unflatten(1, (3, -1)).sum(1)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        of_grad = _compiled_terms()(grad, 1, (0, 1, 2, 0, 1, 0))  # [t, 6 E], to sum small products first
        of_weight = _compiled_terms()(weight, 0, (2, 1, 0, 1, 0, 0))  # [6 E, h]
        weight_grad = _product(of_grad[:, : 3 * len(weight)].t(), x, weight.dtype)  # [3 E, h]
        return _product(of_grad, of_weight, x.dtype), weight_grad.unflatten(0, (3, -1)).sum(0)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of bf16 matrices, with sums in fp32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return (left.float() @ right.float()).to(dtype)


@cache
def _compiled_terms() -> Callable[[Tensor, int, tuple[int, ...]], Tensor]:
    return torch.compile(_bf16_terms)


def _bf16_terms(x: Tensor, dim: int, which: tuple[int, ...]) -> Tensor:
    """The chosen ones of the three bf16 terms of fp32 numbers, side by side along `dim`.

    The terms of numbers from 2^-110 on are exact, and bf16 holds smaller ones to within 2^-134. What is not finite, or
    is more than bf16's largest number, has a term that is not finite.
    """
    first = _rounded(x)
    second = _rounded(x - first)
    terms = first, second, x - first - second
    return torch.cat([terms[at] for at in which], dim).bfloat16()


def _rounded(x: Tensor) -> Tensor:
    """To bf16's 8 bits. Not by a cast there and back, which a compiler leaves out."""
    return ((x.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)

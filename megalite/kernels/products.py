"""Matrix products of linear layers: the output, the gradient of the input, and a weight's gradient that is added to a
tensor of wider dtype, its fp32 main gradient."""

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.pieces import piece_buffers, pieces

# Elements of a product that is rounded at once, on a CPU: many, as each product packs `right` anew, yet few enough to
# be a small part of the gradients. The largest weight of GPT-2's smallest blocks (2,359,296) is one tile.
TILE_ELEMENTS = 5 << 19
SMALL = 1 << 19  # elements of a total that stays in the caches: whole, a mixed sum takes a third of the pieces' time


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., k] times the transpose of weight [n, k], plus bias [n] -> [..., n]; not differentiable."""
    return _onednn(x, weight, bias) if _onednn_is_faster(x) else F.linear(x, weight, bias)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """grad [..., n] times weight [n, k] -> [..., k]."""
    return _onednn(grad, weight.t(), None) if _onednn_is_faster(grad) else torch.matmul(grad, weight)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _onednn_is_faster(x: Tensor) -> bool:
    """Than MKL, torch's choice in fp32, which uses AVX-512 on Intel's processors alone: by 10 to 20 % at products of
    `tiny` and `gpt2` on a Zen 4, and not without AVX-512."""
    return x.dtype == torch.float32 and x.is_cpu and not torch.compiler.is_compiling() and _is_amd_with_avx512()


@cache
def _is_amd_with_avx512(processor: Path = Path("/proc/cpuinfo")) -> bool:
    wide = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and processor.exists() and "AuthenticAMD" in processor.read_text(encoding="utf-8")


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
        tiles = max(1, -(-total.numel() // TILE_ELEMENTS))
        rows = -(-total.shape[0] // tiles)  # as many in all tiles: a short one is slow
        product = right.new_empty(rows, total.shape[1])
        (widened,) = piece_buffers(1, total[:rows], total.dtype)
        for tile, columns in zip(total.split(rows), left.split(rows, dim=1), strict=True):
            torch.mm(columns.t(), right, out=product[: len(tile)])
            for part, of_product in pieces(tile, product[: len(tile)]):
                part.add_(widened[: len(part)].copy_(of_product))


# A compiler would take the sum apart: a new tensor of the weight's size, then a copy. An op of our own stays in place.
compiled_add_transposed_product = torch.library.custom_op(
    "megalite::add_transposed_product", add_transposed_product, mutates_args=("total",)
)

"""A weight's gradient as a product that is added to a tensor of wider dtype, its fp32 main gradient."""

import torch
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

"""A Triton kernel that transposes and rounds to a float8 dtype. Triton is a part of torch's builds for CUDA.

A compiler joins a transposition with a pass over rows where it can, and then writes each byte apart.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128  # rows and columns


def transposed(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [m, k] divided by scale [m, 1], powers of two, and rounded; or bytes x of numbers of the dtype -> [k, m]."""
    m, k = x.shape
    out = x.new_empty(k, m, dtype=x.dtype if scale is None else dtype)
    grid = (triton.cdiv(k, TILE), triton.cdiv(m, TILE))
    _write_transposed[grid](out, x.contiguous(), scale, m, k, tile=TILE, scaled=scale is not None, num_warps=8)
    return out.view(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _write_transposed(out, x, scale, m, k, tile: tl.constexpr, scaled: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = tl.program_id(1) * tile + tl.arange(0, tile), tl.program_id(0) * tile + tl.arange(0, tile)
    inside = (rows < m)[:, None] & (columns < k)[None, :]
    numbers = tl.load(x + rows.to(tl.int64)[:, None] * k + columns[None, :], mask=inside)
    if scaled:
        scales = tl.load(scale + rows, mask=rows < m, other=1.0)[:, None]
        numbers = (numbers.to(tl.float32) / scales).to(out.dtype.element_ty)
    tl.store(out + columns.to(tl.int64)[None, :] * m + rows[:, None], numbers, mask=inside)

"""A Triton kernel that transposes and rounds to a float8 dtype. Triton is a part of torch's builds for CUDA.

A compiler joins a transposition with a pass over rows where it can, and then writes each byte apart.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE = 128  # rows and columns


def write_transposed(out: Tensor, x: Tensor, scale: Tensor | None) -> None:
    """out [k, m] = the transpose of x [m, k], divided by scale [m, 1], powers of two, and rounded."""
    m, k = x.shape
    grid = (triton.cdiv(k, TILE), triton.cdiv(m, TILE))
    _write_transposed[grid](out, x.contiguous(), scale, m, k, tile=TILE, scaled=scale is not None, num_warps=8)


@triton.jit  # type: ignore[untyped-decorator]
def _write_transposed(out, x, scale, m, k, tile: tl.constexpr, scaled: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = tl.program_id(1) * tile + tl.arange(0, tile), tl.program_id(0) * tile + tl.arange(0, tile)
    inside = (rows < m)[:, None] & (columns < k)[None, :]
    numbers = tl.load(x + rows.to(tl.int64)[:, None] * k + columns[None, :], mask=inside)
    if scaled:
        scales = tl.load(scale + rows, mask=rows < m, other=1.0)[:, None]
        numbers = (numbers.to(tl.float32) / scales).to(out.dtype.element_ty)
    tl.store(out + columns.to(tl.int64)[None, :] * m + rows[:, None], numbers, mask=inside)

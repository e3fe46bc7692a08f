"""Triton kernels for rows of experts on CUDA: sums of rows, and weight gradients that are summed in fp32.

Group ends are read on the device, so that nothing waits for it, and every sum has one order. Triton is a part of
torch's builds for CUDA; nothing else imports this file.
"""

import triton
import triton.language as tl
from torch import Tensor

WIDTH, HEIGHT = 128, 256  # a program's part of a gradient; with these, DEPTH rows at once were fastest on one H100
DEPTH, WARPS, STAGES = 64, 8, 3


def sum_rows(rows: Tensor, order: Tensor, starts: Tensor, used: Tensor) -> Tensor:
    """[t, h]: sums of the rows [m, h] at `order` [m], those of token i from `starts[i]` [t] on. Rows from `used` [1] on
    are not read. Sums are made in fp32 (fp64 in fp64)."""
    sums, h = rows.new_empty(len(starts), rows.shape[1]), rows.shape[1]
    block = min(1024, triton.next_power_of_2(h))
    grid = (len(starts), triton.cdiv(h, block))
    _sum_rows[grid](sums, rows.contiguous(), order, starts, used, len(order), h, block=block, num_warps=4)
    return sums


def add_transposed_products(total: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    """total [g, v, h], fp32 += left^T right of each group, for left [m, v] and right [m, h] in half precision, whose
    groups end at `ends` [g]."""
    groups, v, h = total.shape
    tiles = triton.cdiv(v, WIDTH) * triton.cdiv(h, HEIGHT)
    sizes = {"width": WIDTH, "height": HEIGHT, "depth": DEPTH}
    _add_transposed_products[(groups * tiles,)](
        *(total, left.contiguous(), right.contiguous(), ends, v, h, tiles),
        **sizes,
        num_warps=WARPS,
        num_stages=STAGES,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows(sums, rows, order, starts, used, count, h, block: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside, last = columns < h, tl.load(used)
    first = tl.load(starts + token)
    behind = tl.load(starts + token + 1, mask=token + 1 < tl.num_programs(0), other=count)
    wide = tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((block,), wide)
    for at in range(first, behind):
        row = tl.load(order + at)
        total += tl.load(rows + row * h + columns, mask=inside & (row < last), other=0.0).to(wide)
    tl.store(sums + token.to(tl.int64) * h + columns, total.to(sums.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_transposed_products(  # type: ignore[no-untyped-def]
    total, left, right, ends, v, h, tiles, width: tl.constexpr, height: tl.constexpr, depth: tl.constexpr
):
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    start, end = tl.load(ends + group - 1, mask=group > 0, other=0), tl.load(ends + group)
    if start < end:
        across = tl.cdiv(h, height)
        of_left = tile // across * width + tl.arange(0, width)
        of_right = tile % across * height + tl.arange(0, height)
        rows = tl.arange(0, depth)
        lefts = left + (start.to(tl.int64) + rows[:, None]) * v + of_left[None, :]
        rights = right + (start.to(tl.int64) + rows[:, None]) * h + of_right[None, :]
        sums = tl.zeros((width, height), tl.float32)
        for rest in range(end - start, 0, -depth):
            there = (rows < rest)[:, None]
            a = tl.load(lefts, mask=there & (of_left < v)[None, :], other=0.0)
            b = tl.load(rights, mask=there & (of_right < h)[None, :], other=0.0)
            sums = tl.dot(a.T, b, sums)
            lefts += depth * v
            rights += depth * h
        out = total + group.to(tl.int64) * v * h + of_left[:, None] * h + of_right[None, :]
        # One addition to each number, which the memory makes: a fifth faster than to read, add and write.
        tl.atomic_add(out, sums, mask=(of_left < v)[:, None] & (of_right < h)[None, :], sem="relaxed")

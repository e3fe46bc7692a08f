"""Products of rows with one matrix per group of rows, as the experts of a layer need them.

`torch.nn.functional.grouped_mm` computes all groups in one kernel, which reads on the device where groups end: in bf16,
on GPUs of compute capability 9 and 10 (H100, B200), for rows that start at multiples of 16 bytes and up to 1,023
groups. For all else torch reads the ends on the host and makes a product per group (ATen/native/GroupedMMUtils.h, torch
2.11 to 2.13). So do we, written to their places and with sums in the main gradient's dtype; CPUs compute that as fast.
Weight gradients of that kernel would be rounded before they are added: our own (expert_rows.py) adds them in fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.products import add_transposed_product

MAX_GROUPS = 1023  # of the kernel


@dataclass(frozen=True)
class RowGroups:
    """How many rows in a row belong to each group: `counts` [g], int64, on the device of the rows, and `on_host` where
    the host knows them. Rows behind the last group belong to none, and what products leave there is undefined."""

    counts: Tensor
    on_host: Sequence[int] | None = None

    @classmethod
    def of(cls, counts: Tensor) -> "RowGroups":
        """Known to the host, unless products can do without: on CUDA it would wait for the device."""
        return cls(counts, None if _has_kernel(counts.device) else counts.tolist())

    @cached_property
    def ends(self) -> Tensor:
        """[g], int32: where each group ends."""
        return self.counts.cumsum(0, dtype=torch.int32)

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """Start and end of each group, on the host."""
        ends = list(accumulate(self.counts.tolist() if self.on_host is None else self.on_host))
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def clear_rest(self, rows: Tensor) -> Tensor:
        """`rows` [m, ...], in place 0 behind the last group where the host knows its end: else nobody reads them."""
        if self.on_host is not None:
            rows[self.ranges[-1][1] :] = 0.0
        return rows


def row_multiple(rows: Tensor, groups: RowGroups) -> int:
    """The number of rows that products should have multiples of. oneDNN (CPUs in bf16 and fp16) compiles a kernel for
    each number of rows that is new to it, which takes ten times as long as the product. A power of two near a sixteenth
    of the mean group has few multiples and adds 3 % of rows."""
    if rows.device.type != "cpu" or rows.dtype.itemsize != 2:
        return 1
    return max(16, 1 << max(1, len(rows) // (16 * len(groups.counts))).bit_length() - 1)


def _filled_up(rows: Tensor, multiple: int) -> Tensor:
    """With zeros behind the rows."""
    return rows if multiple == 1 else F.pad(rows, (0, 0, 0, -len(rows) % multiple))


def grouped_product(rows: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
    """rows [m, k] times the matrix of their group, of `matrices` [g, k, n] -> [m, n]. A matrix may be a transpose."""
    if not len(rows):  # no kernel is asked about nothing
        return rows.new_empty(0, matrices.shape[2])
    if _is_one_kernel(groups, rows, matrices):
        return F.grouped_mm(rows, matrices, offs=groups.ends)
    multiple = row_multiple(rows, groups)
    out = rows.new_empty(len(rows) + multiple - 1, matrices.shape[2])
    for matrix, (start, end) in zip(matrices, groups.ranges, strict=True):
        if start < end:
            stop = end + (start - end) % multiple  # rows of the next group, whose product is written over these later
            torch.mm(_filled_up(rows[start:stop], multiple), matrix, out=out[start:stop])
    return out[: len(rows)]


def add_grouped_transposed_products(total: Tensor, left: Tensor, right: Tensor, groups: RowGroups) -> None:
    """total [g, v, h] += left^T right of each group, for left [m, v], right [m, h]; total may be of wider dtype."""
    if not len(left):
        return
    if not _is_one_kernel(groups, left, right):
        multiple = row_multiple(left, groups)
        for of_group, (start, end) in zip(total, groups.ranges, strict=True):
            if start < end:
                parts = (_filled_up(rows[start:end], multiple) for rows in (left, right))
                add_transposed_product(of_group, *parts)
        return
    from megalite.kernels.expert_rows import add_transposed_products  # imports triton

    wide = total if total.dtype == torch.float32 else torch.zeros_like(total, dtype=torch.float32)
    add_transposed_products(wide, left, right, groups.ends)
    if wide is not total:
        total += wide


def is_one_kernel(device: torch.device, dtype: torch.dtype, groups: int, *strides: int) -> bool:
    """Whether products of rows and matrices with these strides are one kernel, which asks the host for no group."""
    can = dtype == torch.bfloat16 and groups <= MAX_GROUPS and _has_kernel(device)
    return can and all(stride * dtype.itemsize % 16 == 0 for stride in strides)


def _is_one_kernel(groups: RowGroups, *factors: Tensor) -> bool:
    strides = (stride for one in factors for stride in one.stride() if stride != 1)
    return is_one_kernel(factors[0].device, factors[0].dtype, len(groups.counts), *strides)


@cache
def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)

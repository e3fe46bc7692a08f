"""Products of rows with one matrix per group of rows, as the experts of a layer need them.

On CUDA all groups are one `torch.nn.functional.grouped_mm`, which takes neither fp64 nor rows that do not start at
multiples of 16 bytes. Elsewhere each group is a product of its own, written to its place: CPUs compute that as fast.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.products import add_transposed_product


@dataclass(frozen=True)
class RowGroups:
    """How many rows in a row belong to each group: `counts` [g], int64, on the device of the rows. Rows behind the last
    group belong to none: what is computed of them is 0."""

    counts: Tensor

    @cached_property
    def ends(self) -> Tensor:
        """[g], int32: where each group ends."""
        return self.counts.cumsum(0, dtype=torch.int32)

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """Start and end of each group, on the host: on CUDA this waits for the device."""
        ends = self.ends.tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def parts(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Number and rows of each group that has any."""
        for group, (start, end) in enumerate(self.ranges):
            if start < end:
                yield group, rows[start:end]


def grouped_product(rows: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
    """rows [m, k] times the matrix of their group, of `matrices` [g, k, n] -> [m, n]. A matrix may be a transpose."""
    if not len(rows):  # no kernel is asked about nothing
        return rows.new_empty(0, matrices.shape[2])
    if _is_one_kernel(rows, matrices):
        # CUDA's kernel leaves what is behind the last group as it was in memory.
        behind = torch.arange(len(rows), device=rows.device) >= groups.ends[-1]
        return F.grouped_mm(rows, matrices, offs=groups.ends).masked_fill_(behind.unsqueeze(1), 0.0)
    out = rows.new_empty(len(rows), matrices.shape[2])
    out[groups.ranges[-1][1] :] = 0.0
    for (group, part), (_, its) in zip(groups.parts(rows), groups.parts(out), strict=True):
        torch.mm(part, matrices[group], out=its)
    return out


def add_grouped_transposed_products(total: Tensor, left: Tensor, right: Tensor, groups: RowGroups) -> None:
    """total [g, v, h] += left^T right of each group, for left [m, v], right [m, h]; total may be of wider dtype.

    One CUDA kernel for all groups rounds each sum over the rows to the rows' dtype before it is added.
    """
    if not len(left):
        return
    if _is_one_kernel(left, right):
        total += F.grouped_mm(left.t(), right, offs=groups.ends)
        return
    for (group, of_left), (_, of_right) in zip(groups.parts(left), groups.parts(right), strict=True):
        add_transposed_product(total[group], of_left, of_right)


def _is_one_kernel(*factors: Tensor) -> bool:
    aligned = all(stride * one.itemsize % 16 == 0 for one in factors for stride in one.stride() if stride != 1)
    return aligned and factors[0].is_cuda and factors[0].dtype != torch.float64

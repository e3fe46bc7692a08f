"""Triton kernels for rows of experts beside the same in fp64."""

import pytest
import torch

from tests.kernels import plain_expert_rows

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(("v", "h"), [(1536, 2048), (2048, 768), (24, 40)])
def test_weight_gradients_are_added_in_fp32_in_one_order(v: int, h: int) -> None:
    """Groups of any size, an empty one, and rows of nobody that are NaN."""
    from megalite.kernels import expert_rows

    counts = torch.tensor([300, 0, 64, 1, 1000, 129, 2], device=CUDA)
    m, ends = int(counts.sum()) + 50, counts.cumsum(0, dtype=torch.int32)
    left, right = (torch.randn(m, size, device=CUDA).bfloat16() for size in (v, h))
    left[-50:] = right[-50:] = torch.nan
    start = torch.randn(len(counts), v, h, device=CUDA)
    wanted, found = start.double(), [start.clone() for _ in range(3)]
    plain_expert_rows.add_transposed_products(wanted, left, right, ends)
    for total in found:
        expert_rows.add_transposed_products(total, left, right, ends)
    assert torch.equal(found[0][1], start[1])
    assert all(torch.equal(total, found[0]) for total in found)
    assert float((found[0] - wanted).norm() / wanted.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("h", [16, 768, 2048])
def test_sums_of_rows_leave_out_what_is_behind_the_used_ones(h: int, dtype: torch.dtype) -> None:
    from megalite.kernels import expert_rows

    order = torch.randperm(400, device=CUDA)
    starts = torch.tensor([0, 8, 8, 20, 399], device=CUDA)  # a token without rows, and many rows
    rows, used = torch.randn(400, h, device=CUDA, dtype=torch.float64).to(dtype), torch.tensor([380], device=CUDA)
    rows[380:] = torch.nan
    wanted = plain_expert_rows.sum_rows(rows.double(), order, starts, used)
    found = [expert_rows.sum_rows(rows, order, starts, used) for _ in range(2)]
    assert torch.equal(*found)
    bound = 400 * torch.finfo(torch.float32).eps * 20 if dtype != torch.float64 else 1e-12
    assert float((found[0].double() - wanted).abs().max()) < bound + torch.finfo(dtype).eps * float(wanted.abs().max())

"""Triton kernels for rows of experts beside the same in fp64. Their CPU form is plain_expert_rows.py."""

import pytest
import torch

from tests.kernels import plain_expert_rows

EPS = torch.finfo(torch.float32).eps
COUNTS = {"any": [300, 0, 64, 1, 1000, 129, 2], "one": [0, 1, 0], "none": [0, 0]}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("v", "h"), [(1536, 2048), (24, 40), (129, 257), (1, 1)])
def test_weight_gradients_are_added_in_fp32_in_one_order(
    triton_device: str, v: int, h: int, dtype: torch.dtype, counts: list[int]
) -> None:
    """Groups of any size, and rows of nobody that are NaN. A sum of n exact products, added to what is there, errs by
    n + 1 additions at most."""
    from megalite.kernels import expert_rows

    if triton_device == "cpu" and (dtype == torch.bfloat16 or v > 1000):
        pytest.skip("triton's interpreter takes bf16 factors for integers, and half a minute for many tiles")
    m, of_group = sum(counts) + 50, torch.tensor(counts, device=triton_device)
    ends = of_group.cumsum(0, dtype=torch.int32)
    left, right = (torch.randn(m, size, device=triton_device).to(dtype) for size in (v, h))
    left[-50:] = right[-50:] = torch.nan
    start = torch.randn(len(counts), v, h, device=triton_device)
    wanted, magnitude, found = start.double(), start.double().abs(), [start.clone() for _ in range(3)]
    plain_expert_rows.add_transposed_products(wanted, left, right, ends)
    plain_expert_rows.add_transposed_products(magnitude, left.abs(), right.abs(), ends)
    for total in found:
        expert_rows.add_transposed_products(total, left, right, ends)
    assert torch.equal(found[0][of_group == 0], start[of_group == 0])
    assert all(torch.equal(total, found[0]) for total in found)
    bound = EPS * (of_group + 1).view(-1, 1, 1) * magnitude
    assert bool(((found[0] - wanted).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("h", [1, 16, 768, 1025, 2048])
def test_sums_of_rows_leave_out_what_is_behind_the_used_ones(triton_device: str, h: int, dtype: torch.dtype) -> None:
    """A token without rows, and many rows. A sum of n rows errs by n additions, and is rounded (in bf16, by triton's
    interpreter, cut off)."""
    from megalite.kernels import expert_rows

    starts, used = (torch.tensor(each, device=triton_device) for each in ([0, 8, 8, 20, 399], [380]))
    order = torch.randperm(400).to(triton_device)
    rows = torch.randn(400, h, device=triton_device, dtype=torch.float64).to(dtype)
    rows[380:] = torch.nan
    wanted, magnitude = (plain_expert_rows.sum_rows(each.double(), order, starts, used) for each in (rows, rows.abs()))
    found = [expert_rows.sum_rows(rows, order, starts, used) for _ in range(2)]
    assert torch.equal(*found)
    sums_in = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    rounding = torch.finfo(dtype).eps / (2 if triton_device == "cuda" else 1)
    bound = (380 * sums_in.eps + rounding) * magnitude + torch.finfo(dtype).smallest_normal
    assert bool(((found[0].double() - wanted).abs() <= bound).all())


@pytest.mark.parametrize(("tokens", "count"), [(3, 0), (1, 1), (0, 0)])
def test_sums_of_few_rows(triton_device: str, tokens: int, count: int) -> None:
    from megalite.kernels import expert_rows

    rows, order = torch.randn(count, 24, device=triton_device), torch.arange(count, device=triton_device)
    starts = torch.zeros(tokens, dtype=torch.int64, device=triton_device)
    sums = expert_rows.sum_rows(rows, order, starts, torch.tensor([count], device=triton_device))
    assert torch.equal(sums, rows.sum(0, keepdim=True).expand(tokens, -1))

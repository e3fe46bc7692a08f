"""Products of rows with the matrix of their group: a loop's, with groups of no row and rows of no group."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels import grouped
from megalite.kernels.grouped import RowGroups, add_grouped_transposed_products, grouped_product

COUNTS = [3, 0, 5, 0]
ROWS = 11  # three of no group


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


@pytest.fixture(params=["loop", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel is the CPU's, which here leaves, as CUDA's does, what it finds behind the last group."""
    product = F.grouped_mm

    def on_cuda(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        out = product(left.contiguous() if right.ndim == 3 else left, right, offs=offs)
        if right.ndim == 3:
            out[int(offs[-1]) :] = torch.nan
        return out

    if request.param == "kernel":
        monkeypatch.setattr(grouped, "_is_one_kernel", lambda *factors: True)
        monkeypatch.setattr(F, "grouped_mm", on_cuda)
    return str(request.param)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_no_group_give_zeros_and_take_no_part(way: str, dtype: torch.dtype, transposed: bool) -> None:
    groups = RowGroups(torch.tensor(COUNTS))
    rows, matrices = drawn(ROWS, 8, dtype=dtype), drawn(4, 8, 16, dtype=dtype)
    if transposed:
        matrices = drawn(4, 16, 8, dtype=dtype).transpose(1, 2)
    found = grouped_product(rows, matrices, groups)
    expected = torch.cat([rows[:3] @ matrices[0], rows[3:8] @ matrices[2], rows.new_zeros(3, 16)])
    torch.testing.assert_close(found, expected)

    left = drawn(ROWS, 16, dtype=dtype)
    total = torch.ones(4, 16, 8, dtype=torch.float32)
    add_grouped_transposed_products(total, left, rows, groups)
    added = total - 1
    assert not added[[1, 3]].any(), "nothing is added of a group without rows"
    exact = torch.stack([left[:3].t().float() @ rows[:3].float(), left[3:8].t().float() @ rows[3:8].float()])
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(added[[0, 2]], exact, **close)

"""Products of rows with the matrix of their group: a loop's, with groups of no row and rows of no group."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.schema import MoEConfig
from megalite.kernels import grouped
from megalite.kernels.grouped import RowGroups, add_grouped_transposed_products, grouped_product, row_multiple
from megalite.moe.dispatch import ExpertRanks
from megalite.moe.experts import Experts
from megalite.tensor_parallel.layers import TpContext
from tests.kernels import plain_expert_rows

ROWS = 11
COUNTS = {"some": [3, 0, 5, 0], "one for all": [0, 11, 0, 0], "all in use": [1, 2, 3, 5], "nobody": [0, 0, 0, 0]}
H, WIDTH = 16, 24
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(params=["loop", "kernel", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The kernel is the CPU's, which here leaves what it finds where CUDA's does; on CUDA it depends on the GPU."""
    product = F.grouped_mm

    def on_cuda(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        out = product(left.contiguous(), right, offs=offs)
        out[int(offs[-1]) :] = torch.nan
        return out

    if request.param == "kernel":
        monkeypatch.setattr(grouped, "_is_one_kernel", lambda *factors: True)
        monkeypatch.setattr(F, "grouped_mm", on_cuda)
        plain_expert_rows.stand_in(monkeypatch)
    return CUDA if request.param == "cuda" else CPU


def drawn(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)
    return values.to(device, dtype)


def group_of_row(counts: list[int]) -> list[int | None]:
    of_groups = [group for group, count in enumerate(counts) for _ in range(count)]
    return [*of_groups, *[None] * (ROWS - len(of_groups))]


def bounds(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 5e-2}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_a_row_is_multiplied_with_the_matrix_of_its_group(
    device: torch.device, counts: list[int], dtype: torch.dtype, transposed: bool
) -> None:
    rows, matrices = drawn(ROWS, H, dtype=dtype, device=device), drawn(4, H, WIDTH, dtype=dtype, device=device)
    if transposed:
        matrices = drawn(4, WIDTH, H, dtype=dtype, device=device).transpose(1, 2)
    found = grouped_product(rows, matrices, RowGroups.of(torch.tensor(counts, device=device)))
    for row, its, group in zip(found, rows, group_of_row(counts), strict=True):
        if group is not None:
            torch.testing.assert_close(row.float(), its.float() @ matrices[group].float(), **bounds(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products_of_columns_are_added_group_by_group(
    device: torch.device, counts: list[int], dtype: torch.dtype
) -> None:
    """Rows of no group take no part, NaN or not; to groups without rows nothing is added."""
    left, right = (drawn(ROWS, size, dtype=dtype, device=device) for size in (WIDTH, H))
    left[sum(counts) :] = torch.nan
    total = torch.ones(4, WIDTH, H, device=device)
    expected = total.clone()
    for of_left, of_right, group in zip(left, right, group_of_row(counts), strict=True):
        if group is not None:
            expected[group] += torch.outer(of_left.float(), of_right.float())
    add_grouped_transposed_products(total, left, right, RowGroups.of(torch.tensor(counts, device=device)))
    torch.testing.assert_close(total, expected, **bounds(dtype))
    assert all(bool((total[group] == 1).all()) for group in range(4) if not counts[group])


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rows_of_no_expert_give_zeros_and_have_no_gradient(
    device: torch.device, counts: list[int], on_host: bool
) -> None:
    """Where the host does not know their number, only their weights have a gradient that anybody reads."""
    dtype, config = torch.bfloat16, MoEConfig(num_experts=4)
    experts = Experts(config, H, ("up", (WIDTH,)), F.gelu, ExpertRanks(), TpContext(dtype, device))
    for weight in experts.parameters():
        weight.data.copy_(drawn(*weight.shape, dtype=dtype, device=device))
    rows = drawn(ROWS, H, dtype=dtype, device=device).requires_grad_()
    weights = torch.ones(ROWS, device=device, requires_grad=True)
    groups = RowGroups(torch.tensor(counts, device=device), counts if on_host else None)
    y = experts(rows, weights, groups)
    y.backward(torch.ones_like(y))
    for one in (y, rows.grad, weights.grad):
        assert one is not None
        read = ROWS if on_host or one is weights.grad else sum(counts)
        assert one.view(ROWS, -1).any(1).tolist()[:read] == [row < sum(counts) for row in range(read)]
    for weight in experts.parameters():
        assert weight.grad is not None
        of_group = weight.grad.flatten(1)
        assert bool(of_group.isfinite().all())
        assert of_group.any(1).tolist() == [count > 0 for count in counts]


def test_nothing_is_made_of_no_rows(device: torch.device) -> None:
    groups = RowGroups.of(torch.zeros(4, dtype=torch.int64, device=device))
    no_rows, matrices = drawn(0, H, dtype=torch.bfloat16, device=device), torch.empty(4, H, WIDTH, device=device)
    assert grouped_product(no_rows, matrices, groups).shape == (0, WIDTH)
    total = torch.zeros(4, H, H, device=device)
    add_grouped_transposed_products(total, no_rows, no_rows, groups)
    assert not total.any()


def test_the_kernel_is_asked_only_where_torch_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere torch would ask the device where groups end, or refuse."""

    def is_one_kernel(*factors: Tensor, groups: int = 4) -> bool:
        return grouped._is_one_kernel(RowGroups(torch.zeros(groups)), *factors)

    rows = torch.zeros(ROWS, H, dtype=torch.bfloat16)
    assert not is_one_kernel(rows), "no kernel on a CPU"
    monkeypatch.setattr(grouped, "_has_kernel", lambda device: True)
    assert is_one_kernel(rows)
    assert is_one_kernel(rows.t(), rows)
    assert not is_one_kernel(rows, groups=1024)
    assert not is_one_kernel(rows, torch.zeros(ROWS, 12, dtype=torch.bfloat16)), "rows start at multiples of 24 bytes"
    assert not any(is_one_kernel(rows.to(dtype)) for dtype in (torch.float16, torch.float32, torch.float64))


@pytest.mark.parametrize(
    ("rows", "groups", "dtype", "multiple"),
    [
        (4096, 8, torch.bfloat16, 32),
        (4095, 8, torch.float16, 16),
        (0, 8, torch.bfloat16, 16),
        (1 << 20, 8, torch.bfloat16, 8192),
        (4096, 8, torch.float32, 1),
    ],
)
def test_few_numbers_of_rows_occur_where_each_costs_a_kernel(
    rows: int, groups: int, dtype: torch.dtype, multiple: int
) -> None:
    assert row_multiple(torch.empty(rows, 1, dtype=dtype), RowGroups(torch.zeros(groups))) == multiple

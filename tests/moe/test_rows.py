"""Tokens become rows and rows tokens again, by any choice, with sums that are rounded once."""

import pytest
import torch

from megalite.moe.rows import Rows, inverse
from tests.kernels import plain_expert_rows

K, TOKENS, H = 8, 5, 16
CHOICES = {
    "each once": torch.randperm(K * TOKENS, generator=torch.Generator().manual_seed(0)).tolist(),
    "some": [39, 3, 0, 4, 38, 7, 1],  # those of the first token and of the last
    "some twice": [9, 3, 0, 4, 9, 7, 1, 3],
    "none": [],
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CHOICES)
def test_sums_of_rows_are_rounded_once(name: str, dtype: torch.dtype, device: str) -> None:
    """And are what each row adds to its token; gradients are the tokens' and the rows' own."""
    choices = torch.tensor(CHOICES[name], dtype=torch.int64)
    rows = Rows.of_choices(choices.to(device), TOKENS, K, complete=name == "each once")
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(n, H, generator=generator, dtype=torch.float64).to(dtype) for n in (TOKENS, len(choices)))
    of_row = choices // K
    summed = torch.zeros(TOKENS, H, dtype=torch.float64).index_add_(0, of_row, y.double())
    absolute = torch.zeros_like(summed).index_add_(0, of_row, y.double().abs())
    ulp = torch.finfo(dtype).eps
    once = ulp / 2 * summed.abs() + K * torch.finfo(torch.float32).eps * absolute
    one_each = x.to(device).requires_grad_(), y.to(device).requires_grad_()
    taken, total = rows.take(one_each[0]), rows.sum(one_each[1])
    (x_grad,) = torch.autograd.grad(taken, one_each[0], one_each[1].detach())
    (y_grad,) = torch.autograd.grad(total, one_each[1], one_each[0].detach())
    for copies in (taken, y_grad):
        assert torch.equal(copies.cpu(), x[of_row])
    for sums in (total, x_grad):
        assert bool(((sums.detach().cpu().double() - summed).abs() <= once).all())


def test_rows_behind_the_used_ones_are_left_out_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens' rows and of the gradients of their copies."""
    plain_expert_rows.stand_in(monkeypatch)
    choices, used = torch.tensor(CHOICES["each once"]), 33
    rows = Rows.of_choices(choices, TOKENS, K, complete=True, used=torch.tensor([used]))
    y = torch.randn(len(choices), H, dtype=torch.float64)
    wanted = torch.zeros(TOKENS, H, dtype=torch.float64).index_add_(0, choices[:used] // K, y[:used])
    y[used:] = torch.nan
    x = torch.zeros(TOKENS, H, dtype=torch.float64, requires_grad=True)
    for sums in (rows.sum(y), *torch.autograd.grad(rows.take(x), x, y)):
        torch.testing.assert_close(sums, wanted, rtol=1e-12, atol=1e-12)


def test_rows_are_put_in_another_order_and_back() -> None:
    order = torch.tensor([2, 0, 3, 1])
    rows = Rows(order, inverse(order), None)
    x = torch.arange(8.0).view(4, 2)
    assert torch.equal(rows.take(x), x[order])
    assert torch.equal(rows.sum(rows.take(x)), x)

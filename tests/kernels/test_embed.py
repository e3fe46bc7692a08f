"""Gradients of embeddings are the sums of fp64, in one order, and nothing else is touched."""

import pytest
import torch

from megalite.kernels.embed import add_rows, embed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [5, 30, 1000])
def test_values_of_equal_rows_are_added_up_and_other_rows_are_left_alone(vocabulary: int, device: str) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    rows = torch.randint(0, min(vocabulary, 20), (30,), generator=generator)
    values = torch.randn(30, 4, dtype=torch.float64, generator=generator)
    start = torch.randn(vocabulary, 4, dtype=torch.float64, generator=generator)
    total = start.clone().to(device)
    add_rows(total, rows.to(device), values.to(device))
    expected = start.clone()
    for row, value in zip(rows.tolist(), values, strict=True):
        expected[row] += value
    torch.testing.assert_close(total.cpu(), expected, rtol=1e-13, atol=1e-13)
    untouched = torch.ones(vocabulary, dtype=torch.bool).scatter_(0, rows, False)
    assert torch.equal(total.cpu()[untouched], start[untouched])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("main", [torch.float32, None])
def test_a_gradient_is_that_of_fp64_in_the_dtype_of_its_sum(main: torch.dtype | None, device: str) -> None:
    """Of a bf16 table, with a main gradient in fp32 and without one; the table is shorter than the tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 9, (4, 50), generator=generator)
    weight = torch.randn(10, 8, generator=generator).bfloat16().to(device).requires_grad_()
    grad = torch.randint(-8, 8, (4, 50, 8), generator=generator).to(device, torch.bfloat16)  # sums below 256: exact
    main_grad = None if main is None else torch.ones(10, 8, device=device)
    out = embed(tokens.to(device), weight, main_grad)
    assert torch.equal(out, weight[tokens.to(device)])
    out.backward(grad)
    wanted = torch.nn.functional.one_hot(tokens.flatten(), 10).double().t() @ grad.flatten(0, 1).cpu().double()
    found, other, start = (weight.grad, main_grad, 0) if main is None else (main_grad, weight.grad, 1)
    assert other is None
    assert found is not None
    assert torch.equal(found.cpu().double(), wanted + start)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1_000, 20_000])
@pytest.mark.parametrize("vocabulary", [100, 50_000])
def test_the_order_of_additions_is_the_same_every_time(vocabulary: int, tokens: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    rows = torch.randint(0, 50, (tokens,), device="cuda", generator=generator)
    values = torch.randn(tokens, 64, device="cuda", generator=generator)
    found = [torch.zeros(vocabulary, 64, device="cuda") for _ in range(6)]
    weight = torch.zeros(vocabulary, 64, device="cuda", requires_grad=True)
    for total in found[:3]:
        add_rows(total, rows, values)
    for total in found[3:]:
        total.copy_(torch.autograd.grad(embed(rows, weight, None), weight, values)[0])
    assert all(torch.equal(found[0], total) for total in found[1:])

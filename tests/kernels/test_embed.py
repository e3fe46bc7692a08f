"""Gradients of an embedding, as CUDA adds them up: the sums of index_add_, and nothing else is touched."""

import pytest
import torch

from megalite.kernels.embed import add_sums_of_equal_rows


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("vocabulary", [5, 30, 1000])
def test_values_of_equal_rows_are_added_up_and_other_rows_are_left_alone(vocabulary: int, device: str) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    rows = torch.randint(0, min(vocabulary, 20), (30,), generator=generator)
    values = torch.randn(30, 4, dtype=torch.float64, generator=generator)
    start = torch.randn(vocabulary, 4, dtype=torch.float64, generator=generator)
    total = start.clone().to(device)
    add_sums_of_equal_rows(total, rows.to(device), values.to(device))
    expected = start.index_add(0, rows, values)
    torch.testing.assert_close(total.cpu(), expected, rtol=1e-13, atol=1e-13)
    untouched = torch.ones(vocabulary, dtype=torch.bool).scatter_(0, rows, False)
    assert torch.equal(total.cpu()[untouched], start[untouched])


@pytest.mark.gpu
def test_the_order_of_additions_is_the_same_every_time() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    rows = torch.randint(0, 50, (20_000,), device="cuda", generator=generator)
    values = torch.randn(20_000, 64, device="cuda", generator=generator)
    for vocabulary in (100, 50_000):
        found = [torch.zeros(vocabulary, 64, device="cuda") for _ in range(3)]
        for total in found:
            add_sums_of_equal_rows(total, rows, values)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])

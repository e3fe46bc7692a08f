"""Products of two precisions: added to a wider total, whatever the tiles and pieces, and of fp32 as terms of bf16."""

import pytest
import torch

from megalite.kernels import products
from megalite.kernels.products import add_transposed_product, wide_product

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("elements", [1, 45, 10**6], ids=["a-row", "some-rows", "whole"])
def test_a_bf16_product_is_added_in_fp32(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    for name, size in (("SMALL", 0), ("TILE_ELEMENTS", 90), ("CACHED_ELEMENTS", elements)):
        monkeypatch.setattr(products, name, size)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(17, n, generator=generator).bfloat16() for n in (23, 9))
    total = torch.ones(23, 9)
    add_transposed_product(total, left, right)
    assert torch.equal(total, 1.0 + torch.mm(left.t(), right).float())


def numbers(*shape: int, powers: int, seed: int) -> torch.Tensor:
    """Of either sign, between 2^-powers and 2^powers, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** torch.randint(-powers, powers + 1, shape, generator=generator)
    return scale * torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.9)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("t", "outputs", "h", "powers"), [(48, 16, 256, 0), (70, 13, 40, 20), (1, 3, 24, 40)])
def test_a_product_of_bf16_terms_is_that_of_fp64(
    monkeypatch: pytest.MonkeyPatch, t: int, outputs: int, h: int, powers: int, compiled: bool, device: str
) -> None:
    """With sums of n summands in fp32, whose order nobody knows, and which tensor units cut off: n eps of their
    magnitudes. x's gradient has 2^-14 of them from terms that are left out, and is rounded to bf16."""
    monkeypatch.setattr(products, "_takes_terms", lambda *factors: True)
    x = numbers(t, h, powers=powers, seed=0).bfloat16()
    weight, grad = numbers(outputs, h, powers=powers, seed=1), numbers(t, outputs, powers=powers, seed=2)
    ours = [part.to(device, copy=True).requires_grad_() for part in (x, weight)]
    logits = wide_product(*ours, compiled=compiled)
    found = logits, *torch.autograd.grad(logits, ours, grad.to(device))
    assert [part.dtype for part in found] == [torch.float32, torch.bfloat16, torch.float32]
    x, weight, grad = x.double(), weight.double(), grad.double()
    factors = (x, weight.t(), h, 0.0), (grad, weight, 3 * outputs, 2**-14), (grad.t(), x, t, 0.0)
    for part, (left, right, count, left_out) in zip(found, factors, strict=True):
        wanted, magnitude = left @ right, left.abs() @ right.abs()
        bound = (1.01 * (count + 3) * torch.finfo(torch.float32).eps + left_out) * magnitude
        bound += torch.finfo(torch.bfloat16).eps * wanted.abs() if part.dtype == torch.bfloat16 else 0.0
        assert bool(((part.detach().cpu().double() - wanted).abs() <= bound).all())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
def test_three_terms_of_bf16_are_an_fp32_number(compiled: bool, device: str) -> None:
    """Of any bits; terms of what is not finite are not, a NaN of ones alone among them."""
    split = torch.compile(products._forward_terms) if compiled else products._forward_terms
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (99_999,), generator=generator, dtype=torch.int64)
    bits = torch.cat((bits, torch.tensor([0, -(2**31), 1, 0x7F800000, -0x800000, 0x7FFFFFFF, 0x7F800001, 0x3F808000])))
    x = bits.to(torch.int32).view(torch.float32)
    terms = split(x.unsqueeze(0).to(device)).cpu()
    assert terms.dtype == torch.bfloat16
    total, exact = terms.double().sum(0), x.double()
    fits = x.abs() < 2.0**128 - 2.0**119  # rounded to bf16
    assert not total[~fits].isfinite().any()
    assert bool(((total - exact).abs()[fits] <= 2.0**-134).all())
    large = fits & (x.abs() >= 2.0**-110)
    assert torch.equal(total[large], exact[large])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_finite_stays_so_in_a_product_of_terms(
    monkeypatch: pytest.MonkeyPatch, place: int, bad: float, device: str
) -> None:
    """In x, in the weight, in the gradient: wherever the product in fp64 has it, and nowhere else."""
    factors = [torch.rand(shape) + 1 for shape in ((5, 8), (3, 8), (5, 3))]
    factors[place][1, 2] = bad
    results = []
    for terms, dtype in ((True, torch.float32), (False, torch.float64)):
        monkeypatch.setattr(products, "_takes_terms", lambda *factors, terms=terms: terms)
        x, weight, grad = (part.to(device, dtype) for part in factors)
        leaves = [(x.bfloat16() if terms else x).requires_grad_(), weight.requires_grad_()]
        y = wide_product(*leaves)
        results.append([part.isfinite() for part in (y, *torch.autograd.grad(y, leaves, grad))])
    assert all(map(torch.equal, *results))
    assert not all(bool(part.all()) for part in results[0])

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


@pytest.fixture(params=["plainly", "compiled"])
def _both_forms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms as written, which is quick to test, and as the compiler makes them, which is what runs."""
    torch.compiler.reset()
    if request.param == "plainly":
        monkeypatch.setattr(products, "_compiled_terms", lambda: products._bf16_terms)


def numbers(*shape: int, powers: int, seed: int) -> torch.Tensor:
    """Numbers of either sign from 2^-powers to 2^powers, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** torch.randint(-powers, powers + 1, shape, generator=generator)
    return scale * torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.9)


def product_and_gradients(*factors: torch.Tensor, by_terms: bool = True) -> tuple[torch.Tensor, ...]:
    """The product of x and weight, and their gradients from `grad`."""
    x, weight, grad = factors
    leaves = [part.clone().requires_grad_() for part in (x, weight)]
    out = wide_product(*leaves, by_terms=by_terms)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


@pytest.mark.usefixtures("_both_forms")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("t", "outputs", "h", "powers"), [(48, 16, 256, 0), (70, 13, 40, 20), (1, 3, 24, 40)])
def test_a_product_of_bf16_terms_is_that_of_fp64(t: int, outputs: int, h: int, powers: int, device: str) -> None:
    """As near as one of fp32. Sums of n numbers, in any order, rounded or cut off, err by n eps of the magnitudes.

    Terms have 1.008 of the magnitude of their number, and are summed at the end by two additions. The gradient of x
    lacks 2^-22, two eps, and is rounded to bf16, where only the last rounding is larger than fp32's.
    """
    x = numbers(t, h, powers=powers, seed=0).bfloat16()
    weight, grad = numbers(outputs, h, powers=powers, seed=1), numbers(t, outputs, powers=powers, seed=2)
    found = product_and_gradients(*(part.to(device) for part in (x, weight, grad)))
    assert [part.dtype for part in found] == [torch.float32, torch.bfloat16, torch.float32]
    x, weight, grad = x.double(), weight.double(), grad.double()
    factors = (x, weight.t(), h), (grad, weight, 6 * outputs), (grad.t(), x, t)
    for part, (left, right, count) in zip(found, factors, strict=True):
        wanted, magnitude = left @ right, left.abs() @ right.abs()
        bound = 1.02 * (count + 2) * torch.finfo(torch.float32).eps * magnitude
        if part.dtype == torch.bfloat16:
            bound += torch.finfo(torch.bfloat16).eps / 2 * (wanted.abs() + bound)
        assert bool(((part.cpu().double() - wanted).abs() <= bound).all())


@pytest.mark.usefixtures("_both_forms")
@pytest.mark.parametrize("device", DEVICES)
def test_three_terms_of_bf16_are_an_fp32_number(device: str) -> None:
    """Numbers of any bits; terms of what is not finite are not, a NaN of ones alone among them."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (99_999,), generator=generator, dtype=torch.int64)
    bits = torch.cat((bits, torch.tensor([0, -(2**31), 1, 0x7F800000, -0x800000, 0x7FFFFFFF, 0x7F800001, 0x3F808000])))
    x = bits.to(torch.int32).view(torch.float32)
    terms = products._compiled_terms()(x.unsqueeze(0).to(device), 0, (0, 1, 2)).cpu()
    assert terms.dtype == torch.bfloat16
    exact = x.double()
    fits = x.abs() < 2.0**128 - 2.0**119  # rounded to bf16
    assert not terms.double().sum(0)[~fits].isfinite().any()
    left = exact
    for term, most in zip(terms.double(), (2.0**-8, 2.0**-16, 0.0), strict=True):
        left = left - term
        assert bool((left.abs()[fits] <= most * exact.abs()[fits] + 2.0**-134).all())
    large = fits & (x.abs() >= 2.0**-110)
    assert not left[large].any()


@pytest.mark.usefixtures("_both_forms")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", ["x", "weight", "grad"])
def test_what_is_not_finite_stays_so_in_a_product_of_terms(place: str, bad: float, device: str) -> None:
    """Wherever the product in fp64 has it, and nowhere else."""
    factors = {"x": torch.rand(5, 8) + 1, "weight": torch.rand(3, 8) + 1, "grad": torch.rand(5, 3) + 1}
    factors[place][1, 2] = bad
    x, *others = (part.to(device) for part in factors.values())
    found = product_and_gradients(x.bfloat16(), *others)
    exact = product_and_gradients(*(part.double() for part in (x, *others)))
    finite = [part.isfinite() for part in found]
    assert all(map(torch.equal, finite, [part.isfinite() for part in exact]))
    assert not all(bool(part.all()) for part in finite)

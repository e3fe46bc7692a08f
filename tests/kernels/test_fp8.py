"""Numbers are rounded to fp8 by scales that fit them, products are those of the rounded numbers, and no NaN is lost."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.fp8 import E4M3, E5M2, OF_GRADIENTS, Recipe, _transposed, fp8_weight_gradient, rounded
from megalite.tensor_parallel.deferred import DeferredWork
from megalite.tensor_parallel.linear import linear

RECIPES = ("tensorwise", "rowwise")
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
SHAPES = ((5, 3, 32), (48, 32), (48,))  # of x, weight and bias


def numbers_of(dtype: torch.dtype) -> Tensor:
    """All finite numbers of a float8 dtype, in order."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return every[every.isfinite()].unique()


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The number of the dtype that is nearest to each of x; of two, the one with an even last bit."""
    numbers = numbers_of(dtype)
    above = torch.searchsorted(numbers, x.double().contiguous()).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    even = high.to(dtype).view(torch.uint8) % 2 == 0
    return torch.where((x - low > high - x) | ((x - low == high - x) & even), high, low)


def scaled(x: Tensor, dtype: torch.dtype, recipe: str) -> Tensor:
    """What the numbers of x [..., k] are rounded to, in fp64: by plain arithmetic, a row at a time."""
    groups = x.detach().double().flatten(0, -2).clone()
    for row in [groups] if recipe == "tensorwise" else groups:
        largest, scale = row.abs().max().item(), 2.0**-100
        while largest / scale > LARGEST[dtype]:
            scale *= 2
        row.copy_(nearest(row / scale, dtype) * scale)
    return groups.view(x.shape)


def tensors(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> list[Tensor]:
    """x, whose rows differ by powers of ten, weight, bias and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    x, weight, bias, grad = (torch.randn(shape, generator=generator) for shape in (*SHAPES, (5, 3, 48)))
    sizes = 10.0 ** torch.arange(-2, 3).view(5, 1, 1)
    made = [part.to(device, dtype) for part in (x * sizes, weight / 30, bias, grad * 1e-9 * sizes)]
    return [part.requires_grad_() for part in made[:3]] + made[3:]


@pytest.mark.parametrize(("recipe", "dtype"), list(product(RECIPES, (E4M3, E5M2))))
def test_a_scale_is_the_least_power_of_two_with_which_the_largest_number_fits(recipe: str, dtype: torch.dtype) -> None:
    for exponent in range(-80, 81, 4):
        border = LARGEST[dtype] * 2.0**exponent
        for largest in (border, border * (1 + 2**-23), border * (1 + 2**-7), border * 1.9):
            x = torch.tensor([[0.3 * largest, -largest, largest / 2**30], [0.1 * largest, 0.0, largest]])
            bits, scale = rounded(x, dtype, recipe)
            assert scale.shape == ((2, 1) if recipe == "rowwise" else (1, 1))
            assert (scale.log2() == scale.log2().round()).all()
            just_above = largest == border * (1 + 2**-23)  # may round to the border
            assert just_above or torch.equal(scale, torch.full_like(scale, 2.0 ** (exponent + (largest > border))))
            assert torch.equal(bits.double() * scale, scaled(x, dtype, recipe)) or just_above
            assert bits.double().isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_are_rounded_to_the_nearest(recipe: str) -> None:
    x, weight, _, grad = tensors()
    for tensor, dtype in ((x, E4M3), (weight, E4M3), (weight.t(), E4M3), (grad, OF_GRADIENTS[recipe])):
        rows = tensor.detach().flatten(0, -2)
        bits, scale = rounded(rows, dtype, recipe)
        assert bits.dtype == dtype
        assert bits.is_contiguous(), "CUDA's product asks for it"
        assert torch.equal(bits.double() * scale, scaled(rows, dtype, recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_tiny_numbers_stay_what_they_are(recipe: str) -> None:
    x = torch.zeros(3, 16, dtype=torch.bfloat16)
    bits, scale = rounded(x, E4M3, recipe)
    assert bits.double().count_nonzero() == 0
    assert scale.isfinite().all()
    assert torch.equal(linear(x, torch.ones(16, 16, dtype=torch.bfloat16), fp8=Recipe(recipe)), x)
    x[1] = 1e-20  # a row of a gradient whose scale is the number of a step's tokens
    bits, scale = rounded(x, E4M3, recipe)
    assert torch.allclose((bits.double() * scale)[1], x[1].double(), rtol=2**-4, atol=0)
    assert bits.double()[[0, 2]].count_nonzero() == 0


def test_a_small_row_keeps_its_digits_beside_a_large_one_only_rowwise() -> None:
    x = torch.ones(2, 16)
    x[0] = 1e6
    for recipe, kept in (("rowwise", 1.0), ("tensorwise", 0.0)):
        bits, scale = rounded(x, E4M3, recipe)
        assert (bits.double() * scale)[1, 0] == kept


@pytest.mark.parametrize(("recipe", "dtype"), list(product(RECIPES, (torch.bfloat16, torch.float64))))
def test_output_and_gradients_are_products_of_the_rounded_numbers(recipe: str, dtype: torch.dtype) -> None:
    x, weight, bias, grad = tensors(dtype)
    main_grad = torch.zeros(48, 32, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    y = linear(x, weight, bias, main_grad=main_grad, fp8=Recipe(recipe))
    y.backward(grad)
    left, right = scaled(x, E4M3, recipe), scaled(weight, E4M3, recipe)
    back = scaled(grad, OF_GRADIENTS[recipe], recipe) @ scaled(weight.t(), E4M3, recipe).t()
    assert_near(y, left @ right.t() + bias.double(), left.abs() @ right.abs().t() + bias.double().abs())
    assert_near(x.grad, back, back.abs().amax(-1, keepdim=True))
    rows, columns = x.detach().double().flatten(0, 1), grad.double().flatten(0, 1).t()
    assert_near(main_grad.to(dtype), columns @ rows, columns.abs() @ rows.abs())  # of the numbers as they are
    assert_near(bias.grad, columns.sum(1), columns.abs().sum(1))
    assert not torch.equal(y, F.linear(x, weight, bias))


def weight_gradient(grad: Tensor, x: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """The product of the rounded numbers in fp64, and the sum of its terms' sizes."""
    sizes = rounded(x, E4M3, recipe)[1].double()
    left = scaled(grad.double() * sizes, E5M2, "tensorwise").t()
    right = scaled(x, E4M3, recipe) / sizes
    return left @ right, left.abs() @ right.abs()


@pytest.mark.parametrize(("recipe", "dtype"), list(product(RECIPES, (torch.bfloat16, torch.float64))))
def test_weight_gradients_of_several_microbatches_are_summed_without_rounding(recipe: str, dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    main_grad, wanted, sizes = (
        torch.zeros(48, 32, dtype=wide),
        torch.zeros(48, 32).double(),
        torch.zeros(48, 32).double(),
    )
    for factor in (1.0, 0.3, -1.7):
        x, weight, bias, grad = tensors(dtype)
        linear(x, weight, bias, main_grad=main_grad, fp8=Recipe(recipe, True)).backward(grad * factor)
        product, terms = weight_gradient((grad * factor).flatten(0, 1), x.detach().flatten(0, 1), recipe)
        wanted, sizes = wanted + product, sizes + terms
    bound = 2**-20 if wide == torch.float32 else 1e-13  # bf16 would be off by up to 2^-9
    assert ((main_grad.double() - wanted).abs() <= bound * sizes).all()


def assert_within_the_formats_bits(found: Tensor, grad: Tensor, x: Tensor, recipe: str) -> None:
    """Half of the last place of 4 and of 3 bits, or half of the least number where that is more."""
    (x_scale, grad, x), sizes = (rounded(x, E4M3, recipe)[1].double(), grad.double(), x.double()), grad.double().abs()
    grad_scale = rounded(grad * x_scale, E5M2, "tensorwise")[1].double() / x_scale
    of_x, of_grad = 2**-4 * x.abs() + 2**-10 * x_scale, 2**-3 * sizes + 2**-17 * grad_scale
    bound = sizes.t() @ of_x + of_grad.t() @ (x.abs() + of_x)
    assert ((found.double() - grad.t() @ x).abs() <= bound * (1 + 2**-20)).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_gradients_are_as_near_as_the_bits_of_both_formats_allow(recipe: str) -> None:
    x, _, _, grad = (tensor.detach().flatten(0, -2) if tensor.dim() > 1 else tensor for tensor in tensors())
    found = fp8_weight_gradient(grad, x, recipe)
    assert found.dtype == torch.float32
    assert_within_the_formats_bits(found, grad, x, recipe)
    assert not torch.allclose(found.double(), grad.double().t() @ x.double(), rtol=2**-9, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [160, 16, 1040])
def test_weight_gradients_of_small_whole_numbers_are_exact(device: str, recipe: str, tokens: int) -> None:
    """Both formats hold them. A GPU's fp8 products keep 13 bits behind the largest term, and sums of 128 have 11."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU cannot multiply fp8 matrices")
    generator = torch.Generator().manual_seed(2)
    x, grad = (torch.randint(-4, 5, (tokens, width), generator=generator).double() for width in (32, 272))
    wanted, sizes = grad.t() @ x, 2.0 ** (torch.arange(tokens) % 5 - 2)[:, None]
    x, grad = (x * sizes).to(device, torch.bfloat16), (grad * 2.0**-40 / sizes).to(device, torch.bfloat16)
    assert torch.equal(fp8_weight_gradient(grad, x, recipe).cpu().double(), wanted * 2.0**-40)
    for bad in (torch.inf, torch.nan):
        for tensor, hit in ((x, (slice(None), 5)), (grad, (5,))):
            kept, tensor[3, 5] = tensor[3, 5].clone(), bad
            assert fp8_weight_gradient(grad, x, recipe)[hit].isnan().all()
            tensor[3, 5] = kept


@pytest.mark.gpu
def test_cuda_transposes_and_rounds_as_a_cpu_does() -> None:
    generator = torch.Generator().manual_seed(2)
    for tokens, width in ((160, 272), (129, 127), (1, 5)):
        x = torch.randn(tokens, width, generator=generator).bfloat16()
        scale = 2.0 ** (torch.arange(tokens) % 31 - 13)[:, None]  # none overflows, some are below the least number
        for inputs in ((x, scale, E5M2), (rounded(x, E4M3, "rowwise")[0].view(torch.uint8), None, E4M3)):
            found = _transposed(*(it.cuda() if isinstance(it, Tensor) else it for it in inputs)).cpu()
            assert torch.equal(found.view(torch.uint8), _transposed(*inputs).view(torch.uint8))


def assert_near(found: Tensor | None, wanted: Tensor, sizes: Tensor) -> None:
    """Within the rounding of the dtype: of bf16's results and of fp32's sums, or of fp64's."""
    assert found is not None
    bound = 1e-13 if found.dtype == torch.float64 else 2**-8 * wanted.abs() + 2**-20 * sizes
    assert ((found.detach().double() - wanted).abs() <= bound * (sizes if found.dtype == torch.float64 else 1)).all()


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_without_a_main_grad_and_with_work_put_off_gradients_are_the_same(name: str, weights: bool) -> None:
    (x, weight, bias, grad), recipe = tensors(torch.float64), Recipe(name, weights)
    wanted = torch.autograd.grad(linear(x, weight, bias, fp8=recipe), (x, weight, bias), grad)
    main_grad, deferred = torch.zeros(48, 32, dtype=torch.float64), DeferredWork()
    y = linear(x, weight, bias, main_grad=main_grad, deferred=deferred, fp8=recipe)
    with deferred.collecting():
        x_grad, bias_grad = torch.autograd.grad(y, (x, bias), grad)
    assert (len(deferred), main_grad.count_nonzero()) == (1, 0)
    deferred.run_next()
    for found, expected in zip((x_grad, main_grad, bias_grad), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("recipe", "bad"), list(product(RECIPES, (float("inf"), float("-inf"), float("nan")))))
def test_what_is_not_finite_stays_so(recipe: str, bad: float) -> None:
    for which in range(3):  # in x, in the weight, in the gradient of the output
        x, weight, bias, grad = tensors()
        with torch.no_grad():
            (x, weight, grad)[which].view(-1, (x, weight, grad)[which].shape[-1])[4, 7] = bad
        y = linear(x, weight, bias, fp8=Recipe(recipe, True))
        if which != 1:
            (weight_grad,) = torch.autograd.grad(y, weight, grad, retain_graph=True)
            assert weight_grad.isnan().any(), "the step is bad"
        (x_grad,) = torch.autograd.grad(y, x, grad)
        hit = [y.flatten(0, 1)[4], y[..., 4], x_grad.flatten(0, 1)[4]][which]
        assert hit.isnan().all(), "where the number enters"
        if recipe == "rowwise":
            assert (y if which < 2 else x_grad).isnan().sum() == hit.numel(), "and nowhere else"


def compiled_and_not(backend: str, recipe: Recipe, device: str) -> None:
    found = []
    for compiled in (False, True):
        x, weight, bias, grad = tensors(torch.bfloat16, device)
        main_grad = torch.zeros(48, 32, device=device)

        def run(x: Tensor) -> Tensor:
            return linear(x, weight, bias, main_grad=main_grad, fp8=recipe)  # noqa: B023 (called at once)

        run = torch.compile(run, fullgraph=True, dynamic=False, backend=backend) if compiled else run
        y = run(x)
        y.backward(grad)
        found.append((y.detach(), x.grad, bias.grad, main_grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-20 * one.abs().max().item())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_results_are_the_eager_ones(backend: str, recipe: str, weights: bool) -> None:
    compiled_and_not(backend, Recipe(recipe, weights), "cpu")


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", RECIPES)
def test_cuda_gives_what_a_cpu_imitates(recipe: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU cannot multiply fp8 matrices")
    compiled_and_not("inductor", Recipe(recipe), "cuda")
    results: list[Any] = []
    for device in ("cpu", "cuda"):
        x, weight, bias, grad = tensors(torch.bfloat16, device)
        y = linear(x, weight, bias, fp8=Recipe(recipe))
        results.append((y.detach().cpu(), *(one.cpu() for one in torch.autograd.grad(y, (x, weight, bias), grad))))
        for part, dtype in ((x, E4M3), (weight, E4M3), (weight.t(), E4M3), (grad, OF_GRADIENTS[recipe])):
            bits, scale = rounded(part.detach().flatten(0, -2), dtype, recipe)
            assert torch.equal((bits.double() * scale).cpu(), scaled(part.cpu().flatten(0, -2), dtype, recipe))
    for one, other in zip(*results, strict=True):  # in forward, fast sums keep 14 bits
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-12 * one.abs().max().item())

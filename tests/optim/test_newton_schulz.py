"""Newton-Schulz: singular values go where the polynomials send them, whatever the matrix looks like."""

from collections.abc import Sequence
from functools import reduce

import pytest
import torch
from torch import Tensor

from megalite.optim.newton_schulz import orthogonalised, polynomials

Polynomial = tuple[float, float, float]  # a s + b s^3 + c s^5
JORDAN: Polynomial = (3.4445, -4.7750, 2.0315)
TABLES: dict[str, list[Polynomial]] = {
    "jordan": [JORDAN] * 5,
    "quintic": [
        *((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)),
        *((2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)),
    ],
    "polar_express": [
        *((8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250)),
        *((3.2856, -2.4153, 0.4853), (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585)),
        *((1.8564, -1.2132, 0.3568), (1.8750, -1.25, 0.375)),
    ],
    "deepseek_v4": [JORDAN] * 8 + [(2.0, -1.5, 0.5)] * 2,
}
BANDS = [  # what docs/optimizer.md says of singular values after a table, for matrices of this condition, and digits
    ("jordan", 10.0, (0.68, 1.13), 2),
    ("quintic", 10.0, (0.98, 1.03), 2),
    ("polar_express", 1e2, (1.0, 1.0), 3),
    ("deepseek_v4", 1e3, (1.0, 1.001), 3),
]


def reference(x: Tensor, table: Sequence[Polynomial]) -> Tensor:
    """One matrix [r, c], by definition."""
    if len(x) > len(x.T):
        return reference(x.T, table).T
    x = x / x.norm().clamp(min=1e-15)
    for a, b, c in table:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_condition(condition: float, rows: int = 48, columns: int = 80) -> Tensor:
    """A matrix whose singular values fall evenly to 1 / condition."""
    left, right = (torch.linalg.qr(normal(size, rows, seed=size))[0] for size in (rows, columns))
    values = torch.linspace(1.0, 1.0 / condition, rows, dtype=torch.float64)
    return torch.einsum("ik,k,jk->ij", left, values, right)


@pytest.mark.parametrize(("name", "condition", "band", "digits"), BANDS)
def test_singular_values_follow_the_polynomials_into_the_band_of_the_table(
    name: str, condition: float, band: tuple[float, float], digits: int
) -> None:
    x = of_condition(condition)
    found = torch.linalg.svdvals(orthogonalised(x, polynomials(name, None)))
    start = torch.linalg.svdvals(x) / x.norm()
    torch.testing.assert_close(found, mapped(start, name).sort(descending=True).values, rtol=1e-12, atol=0)
    # Any matrix whose least value is as large: values are at most 1.
    ends = mapped(torch.linspace(float(start.min()), 1.0, 10**5, dtype=torch.float64), name)
    assert (round(float(ends.min()), digits), round(float(ends.max()), digits)) == band


def mapped(values: Tensor, name: str) -> Tensor:
    """Singular values after all polynomials of a table."""
    return reduce(lambda s, p: p[0] * s + p[1] * s**3 + p[2] * s**5, TABLES[name], values)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("shape", [(7, 7), (5, 33), (33, 5), (1, 9), (3, 12, 20), (3, 20, 12)])
def test_matrices_and_stacks_of_them_tall_or_wide_are_as_by_definition(name: str, shape: tuple[int, ...]) -> None:
    x = normal(*shape) * 1e-9  # far below 1, and above the least norm
    found, table = orthogonalised(x, polynomials(name, None)), polynomials(name, None)
    assert found.shape == x.shape
    wanted = torch.stack([reference(each, TABLES[name]) for each in x.view(-1, *shape[-2:])]).view(shape)
    # At worst an error of the input is multiplied by the gain at zero, the product of all a.
    gain = reduce(lambda product, p: product * p[0], TABLES[name], 1.0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=gain * 4 * torch.finfo(torch.float64).eps)
    torch.testing.assert_close(orthogonalised(x.mT, table).mT, found, rtol=0, atol=1e-13 * gain)


def test_a_matrix_of_zeros_stays_one_beside_others_and_the_input_is_kept() -> None:
    x = normal(3, 6, 4)
    x[1] = 0.0
    kept, table = x.clone(), polynomials("jordan", None)
    found = orthogonalised(x, table)
    assert not found[1].any()
    assert found.isfinite().all()
    assert torch.equal(x, kept)
    torch.testing.assert_close(found[2], orthogonalised(x[2], table), rtol=1e-13, atol=1e-13)
    assert not orthogonalised(x[1], table).any()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_cut_or_goes_on_with_the_last_polynomial(name: str) -> None:
    whole = TABLES[name]
    assert list(polynomials(name, None)) == whole
    for steps in (1, len(whole) - 1, len(whole), len(whole) + 3):
        assert list(polynomials(name, steps)) == (whole + [whole[-1]] * 3)[:steps]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 80), (80, 48)])
def test_narrow_products_are_near_and_keep_the_dtype(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Each of the three products of a polynomial rounds by up to half an eps, and sums of terms of both signs are up to
    |a| + |b| + |c| times the result; later polynomials with a slope below 1 at most keep what came before."""
    x, table = normal(*shape), polynomials("jordan", None)
    found, wanted = orthogonalised(x.to(dtype), table), orthogonalised(x, table)
    assert found.dtype == dtype
    bound = len(table) * sum(map(abs, JORDAN)) * 3 / 2 * torch.finfo(dtype).eps
    assert 0 < (found.double() - wanted).norm() / wanted.norm() < bound

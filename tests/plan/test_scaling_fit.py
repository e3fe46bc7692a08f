"""Laws of made curves, whose exponents are known, are found again; what runs cannot tell is said."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from megalite.errors.problems import UserError
from megalite.plan.scaling_fit import Law, Point, fit, student_t

# Hoffmann et al. 2022, approach 3.
E, A, B, ALPHA, BETA = 1.69, 406.4, 410.7, 0.34, 0.28
GRID = [(n, d) for n in np.geomspace(1e7, 1e9, 3) for d in np.geomspace(1e9, 2e10, 3)]
OF_C, GAMMA = 1070.0, 0.155


def made(sizes: Sequence[tuple[float, float]], noise: float = 0.0, seed: int = 0) -> list[Point]:
    """Runs of these N and D."""
    dice = np.random.default_rng(seed)
    losses = [(E + A / n**ALPHA + B / d**BETA) * np.exp(noise * dice.standard_normal()) for n, d in sizes]
    return [Point(Path(f"{n:g}-{d:g}"), n, d, 6 * n * d, loss) for (n, d), loss in zip(sizes, losses, strict=True)]


def along(computes: Sequence[float], noise: float = 0.0, seed: int = 0, floor: float = E) -> list[Point]:
    """Runs of 20 tokens per parameter."""
    dice = np.random.default_rng(seed)
    sizes = [((c / 120) ** 0.5, 20 * (c / 120) ** 0.5, c) for c in computes]
    losses = [(floor + OF_C / c**GAMMA) * np.exp(noise * dice.standard_normal()) for c in computes]
    return [Point(Path(f"{size[2]:g}"), *size, loss) for size, loss in zip(sizes, losses, strict=True)]


def holds(law: Law, name: str, truth: float) -> bool:
    low, high = law.known[name][1]
    return low <= truth <= high


def test_a_law_without_noise_is_found_exactly() -> None:
    law, remarks = fit(made(GRID))
    assert law.of == ("N", "D")
    assert law.exponents == (pytest.approx(ALPHA, rel=1e-3), pytest.approx(BETA, rel=1e-3))
    assert (law.floor, *law.factors) == (
        pytest.approx(E, rel=5e-3),
        pytest.approx(A, rel=0.02),
        pytest.approx(B, rel=0.02),
    )
    assert law.deviation < 1e-5
    assert remarks == []


def test_the_optimum_is_where_the_law_is_least() -> None:
    """Among all N at one compute, found by trying them."""
    law, _ = fit(made(GRID))
    for compute in (1e18, 1e21):
        found = law.optimum(compute)
        assert found is not None
        tried = np.geomspace(1e6, 1e12, 60_001)
        losses = E + A / tried**ALPHA + B / (compute / 6 / tried) ** BETA
        assert found[0] == pytest.approx(tried[losses.argmin()], rel=0.02)
        assert found[0] * found[1] * 6 == pytest.approx(compute)
        assert law.at(compute) == pytest.approx(losses.min(), rel=1e-4)
    assert law.known["N"][0] == pytest.approx(BETA / (ALPHA + BETA), rel=1e-2)
    assert law.known["L"][0] == pytest.approx(ALPHA * BETA / (ALPHA + BETA), rel=1e-2)


@pytest.mark.parametrize(("count", "noise"), [(5, 0.001), (8, 0.01)])
def test_the_exponent_of_compute_is_in_its_interval_in_95_of_100_draws(count: int, noise: float) -> None:
    laws = [fit(along(np.geomspace(1e17, 1e20, count).tolist(), noise, seed))[0] for seed in range(100)]
    inside = sum(holds(law, "a", GAMMA) for law in laws)
    assert inside >= 95, inside
    assert [law.of for law in laws] == [("C",)] * 100
    widths = [law.known["a"][1][1] - law.known["a"][1][0] for law in laws]
    assert np.median(widths) < {5: 0.05, 8: 0.2}[count]


@pytest.mark.parametrize("draws", [20, pytest.param(100, marks=pytest.mark.long)])
def test_both_exponents_are_in_their_intervals_in_95_of_100_draws(draws: int) -> None:
    laws = [fit(made(GRID, 0.003, seed))[0] for seed in range(draws)]
    truths = {"a": ALPHA, "b": BETA, "N": BETA / (ALPHA + BETA), "L": ALPHA * BETA / (ALPHA + BETA)}
    inside = [all(holds(law, name, truths[name]) for name in "ab") for law in laws]
    assert sum(inside) >= 0.95 * draws, inside
    for name in "NL":
        assert sum(holds(law, name, truths[name]) for law in laws) >= 0.95 * draws
    widths = np.array([[law.known[name][1][1] - law.known[name][1][0] for name in "ab"] for law in laws])
    assert (np.median(widths, axis=0) < [0.15, 0.3]).all(), "what holds everything tells nothing"


def test_an_interval_ends_where_the_least_sum_passes_what_is_allowed() -> None:
    """By a plain definition: for a fixed exponent, the best of all E and A by least squares."""
    points = along(np.geomspace(1e17, 1e20, 6).tolist(), 0.003, 3)
    law, _ = fit(points)
    computes, losses = (np.array([getattr(point, name) for point in points]) for name in ("compute", "loss"))

    def least(exponent: float) -> float:
        columns = np.stack([np.ones(6), (computes / 1e18) ** -exponent], axis=1) / losses[:, None]
        found, *_ = np.linalg.lstsq(columns, np.ones(6), rcond=None)
        assert (found > 0).all()
        return float(((columns @ found - 1) ** 2).sum())

    allowed = least(law.exponents[0]) * (1 + 4.540703**2 / 3)  # 98 % of Student's t with 3 degrees of freedom
    for end in law.known["a"][1]:
        assert least(end) == pytest.approx(allowed, rel=1e-2)


@pytest.mark.parametrize(
    ("spare", "level", "quantile"), [(1, 0.98, 31.820516), (2, 0.95, 4.302653), (30, 0.99, 2.749996)]
)
def test_quantiles_are_those_of_tables(spare: int, level: float, quantile: float) -> None:
    assert student_t(spare, level) == pytest.approx(quantile, rel=1e-4)


def test_an_interval_that_the_runs_do_not_close_is_open() -> None:
    points = along(np.geomspace(1e19, 2e19, 4).tolist(), 0.02, 1)
    (low, high) = fit(points)[0].known["a"][1]
    assert (low, high) == (0.0, inf)


def test_too_few_amounts_of_compute_leave_out_what_they_cannot_tell() -> None:
    law, remarks = fit(along([1e17, 1e18, 1e19], floor=0.0))
    assert (law.floor, law.exponents[0]) == (0.0, pytest.approx(GAMMA, rel=1e-3))
    assert "no irreducible loss" in remarks[1]
    for points in (along([1e17, 1e18]), [*along([1e17, 1e18]), *along([1e17, 1e18])]):
        with pytest.raises(UserError, match="at least 3 amounts of compute, and these runs have 2"):
            fit(points)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ([(n, 20 * n) for n in np.geomspace(1e7, 1e9, 8)], "tokens follow parameters in these runs"),
        ([(n, n**1.3) for n in np.geomspace(1e7, 1e9, 8)], "tokens follow parameters in these runs"),
        (GRID[:5], "it needs 6 runs with 3 values of each, and there are 5"),
        ([(n, d) for n in (1e7, 1e8) for d in (1e9, 2e9, 4e9, 8e9)], "there are 8 with 2 of N"),
    ],
)
def test_n_and_d_are_told_apart_only_where_they_vary_apart(sizes: list[tuple[float, float]], why: str) -> None:
    law, remarks = fit(made(sizes))
    assert law.of == ("C",)
    assert why in remarks[0]
    assert law.optimum(1e20) is None


def test_no_coefficient_is_negative() -> None:
    """A loss that rises with the tokens tells nothing of them: the law leaves them out."""
    points = [
        replace(point, loss=2 + 100 / point.parameters**0.3 + 1e-3 * np.log(point.tokens)) for point in made(GRID)
    ]
    law, _ = fit(points)
    assert min(law.floor, *law.factors) >= 0
    assert law.factors[1] == 0
    assert law.optimum(1e20) is None

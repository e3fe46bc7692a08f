"""Fits how the loss L falls with parameters N, tokens D and compute C: pure arithmetic on the numbers of finished runs.

Where N and D vary apart, L = E + A / N^a + B / D^b (Hoffmann et al. 2022, arXiv 2203.15556, approach 3); else, as at a
constant number of tokens per parameter, L = E + A / C^a. Given the exponents a law is linear in E, A and B, of which
none is negative, so that only exponents are searched, on grids that narrow.

What is least is S, the sum of squared relative deviations. An interval holds the values of an exponent for which some
law fits nearly as well as the best one: S <= least S * (1 + t^2 / points to spare), with Student's t (a profile
likelihood). It needs no normal distribution of the exponents, which a few runs do not give, and is open where the runs
do not tell.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, inf, log, nan, pi, tan
from pathlib import Path
from typing import Any

import numpy as np

from megalite.errors.problems import NO_VALUE, Problem, UserError

LEVEL = 0.98  # with which the intervals of all exponents of a law hold together
LEAST, MOST = 0.01, 4.0  # exponents that are searched
CELLS, ROUNDS = 15, 5  # of grids that narrow: exponents to a ten thousandth
RIDGE = 1e-13  # keeps terms that are nearly equal from being singular
APART = 0.1  # by which ln D must leave a line over ln N, so that both are known to vary
FLOPS = 6.0  # of a parameter and token, forward and backward
Array = np.ndarray[Any, np.dtype[np.float64]]
Interval = tuple[float, float]  # infinite, or 0, where it is open
Place = Callable[[Array, Array], tuple[Array, ...]]  # the exponents, by the value whose interval is sought and another


@dataclass(frozen=True)
class Point:
    """A finished run: parameters that a token meets, tokens, model FLOPs and loss."""

    run: Path
    parameters: float
    tokens: float
    compute: float
    loss: float


@dataclass(frozen=True)
class Law:
    """L = floor + the sum of factor / amount^exponent over the amounts `of` (N and D, or C). `known`: values and
    intervals of the exponents a and b; of a law of N and D also those with which the best N grows (N) and the least
    loss nears the floor (L) as the compute grows. `deviation`: the relative one of a run from the law."""

    of: tuple[str, ...]
    floor: float
    factors: tuple[float, ...]
    exponents: tuple[float, ...]
    known: dict[str, tuple[float, Interval]]
    deviation: float

    def __str__(self) -> str:
        terms = zip(self.factors, self.of, self.exponents, strict=True)
        return " + ".join([f"{self.floor:.4g}", *(f"{factor:.4g} / {of}^{power:.3f}" for factor, of, power in terms)])

    def loss(self, *amounts: float) -> float:
        """The loss at N and D, or at C."""
        terms = zip(self.factors, amounts, self.exponents, strict=True)
        return self.floor + sum((factor / amount**exponent for factor, amount, exponent in terms), 0.0)

    def of_point(self, point: Point) -> float:
        """The loss that the law says of a run."""
        return self.loss(point.compute) if self.of == ("C",) else self.loss(point.parameters, point.tokens)

    def optimum(self, compute: float) -> tuple[float, float] | None:
        """N and D of the least loss at 6 N D = compute; None for a law of C, or where N or D does not matter."""
        if self.of == ("C",) or min(self.factors) <= 0:
            return None
        (a, b), (of_n, of_d) = self.exponents, self.factors
        parameters = (a * of_n / (b * of_d)) ** (1 / (a + b)) * (compute / FLOPS) ** (b / (a + b))
        return parameters, compute / FLOPS / parameters

    def at(self, compute: float) -> float:
        """The least loss at this compute; nan where the law does not tell it."""
        best = self.optimum(compute)
        return self.loss(compute) if self.of == ("C",) else self.loss(*best) if best else nan


def fit(points: Sequence[Point]) -> tuple[Law, list[str]]:
    """The law of the runs, and remarks on what they do not tell. UserError where they are too few for any."""
    n, d, c, losses = np.array([[it.parameters, it.tokens, it.compute, it.loss] for it in points], dtype=float).T
    missing = _missing(n, d)
    if not missing:
        return _fit(losses, {"N": n, "D": d}, floor=True), []
    sizes, spare = _different(c), len(points) - 3
    if sizes < 3:
        rule = f"a law needs at least 3 amounts of compute, and these runs have {sizes}"
        hint = "runs of more sizes: python -m megalite scaling plan --sizes 5"
        raise UserError(Problem("RUN", NO_VALUE, rule, hint))
    remarks = [f"no law of N and D: {missing}"]
    floor = spare >= 1 and sizes > 3
    remarks += [] if floor else ["no irreducible loss: that takes 4 amounts of compute; E is 0 here"]
    return _fit(losses, {"C": c}, floor=floor), remarks


def _missing(n: Array, d: Array) -> str:
    """What keeps runs from telling N and D apart; empty where they do."""
    few = [f"{found} of {name}" for name, its in (("N", n), ("D", d)) if (found := _different(its)) < 3]
    if len(n) < 6 or few:
        return f"it needs 6 runs with 3 values of each, and there are {len(n)}{' with ' if few else ''}{', '.join(few)}"
    line = np.polynomial.Polynomial.fit(np.log(n), np.log(d), 1)
    off = np.abs(np.log(d) - line(np.log(n))).max()
    return "" if off > APART else "tokens follow parameters in these runs; vary --tokens-per-parameter"


def _different(amounts: Array) -> int:
    """How many amounts there are that are more than a percent apart."""
    ordered = np.sort(np.log(amounts))
    return 1 + int((np.diff(ordered) > 0.01).sum())


def _fit(losses: Array, amounts: dict[str, Array], *, floor: bool) -> Law:
    means = [exp(np.log(its).mean()) for its in amounts.values()]
    search = _Search([its / mean for its, mean in zip(amounts.values(), means, strict=True)], losses, floor)
    best, at = search.best()
    spare = len(losses) - 2 * len(amounts) - floor
    level = 1 - (1 - LEVEL) / len(amounts)
    allowed = best * (1 + student_t(spare, level) ** 2 / spare)
    known = {name: (value, search.interval(place, ends, value, allowed)) for name, place, ends, value in _sought(at)}
    coefficients = search.sums(np.array([at]))[1][:, 0]
    factors = zip(coefficients[int(floor) :], means, at, strict=True)
    scaled = tuple(float(factor * mean**power) for factor, mean, power in factors)
    start = float(coefficients[0]) if floor else 0.0
    return Law(tuple(amounts), start, scaled, at, known, (best / spare) ** 0.5)


def _sought(at: tuple[float, ...]) -> Iterator[tuple[str, Place, Interval, float]]:
    """What gets an interval: name, place, least and greatest value, and the value of the best law."""
    if len(at) == 1:
        yield "a", _as_they_are, (LEAST, MOST), at[0]
        return
    a, b = at
    yield "a", _as_they_are, (LEAST, MOST), a
    yield "b", lambda u, v: (v, u), (LEAST, MOST), b
    yield "N", lambda u, v: (v, v * u / (1 - u)), (LEAST, 1 - LEAST), b / (a + b)
    yield "L", lambda u, v: (v, u * v / (v - u)), (LEAST / 2, MOST / 2), a * b / (a + b)


def _as_they_are(a: Array, b: Array) -> tuple[Array, ...]:
    return a, b


class _Search:
    """The least sums of squared relative deviations by exponents."""

    def __init__(self, amounts: Sequence[Array], losses: Array, floor: bool) -> None:
        self._logs, self._losses, self._floor = [np.log(its) for its in amounts], losses, floor

    def sums(self, exponents: Array) -> tuple[Array, Array]:
        """The least sum for each row of exponents [m, k], and its coefficients [terms, m]; infinite where an exponent
        is not above 0, or beyond the largest."""
        allowed: Array = np.all((exponents > 0) & (exponents < 1.01 * MOST), axis=1)
        exponents = np.where(allowed[:, None], exponents, 1.0)
        powers = [np.exp(-exponents[:, at, None] * logs) for at, logs in enumerate(self._logs)]  # [m, n] each
        floor = [np.ones_like(powers[0])] if self._floor else []
        sums, coefficients = _least_sums([its / self._losses for its in (*floor, *powers)])
        return np.where(allowed, sums, inf), coefficients

    def best(self) -> tuple[float, tuple[float, ...]]:
        """The least sum of all, and its exponents."""
        low, high = log(LEAST), log(MOST)
        for _ in range(ROUNDS):
            grid = np.linspace(low, high, CELLS)
            sums, others = self._profile(_as_they_are, np.exp(grid))
            at = int(sums.argmin())
            low, high = grid[max(at - 1, 0)], grid[min(at + 1, CELLS - 1)]
        return float(sums[at]), (float(np.exp(grid[at])), float(others[at]))[: len(self._logs)]

    def interval(self, place: Place, ends: Interval, value: float, allowed: float) -> Interval:
        """From where to where the least sum stays within what is allowed, seen from the best value."""
        found = []
        for end, if_open in zip(ends, (0.0, inf), strict=True):
            inside, outside = value, end
            if self._profile(place, np.array([end]))[0][0] <= allowed:
                found.append(if_open)
                continue
            for _ in range(ROUNDS):
                grid = np.geomspace(inside, outside, CELLS)
                first = max(1, int((self._profile(place, grid)[0] > allowed).argmax()))
                inside, outside = grid[first - 1], grid[first]
            found.append(float(outside))
        return found[0], found[1]

    def _profile(self, place: Place, values: Array) -> tuple[Array, Array]:
        """For each value the least sum over the other exponent, and that exponent."""
        if len(self._logs) == 1:
            return self.sums(values[:, None])[0], values
        rows = np.arange(len(values))
        low, high = (np.full(len(values), log(end)) for end in (LEAST, MOST))
        for _ in range(ROUNDS):
            grid = np.linspace(low, high, CELLS, axis=1)  # [values, cells]
            with np.errstate(divide="ignore"):  # infinite exponents are not allowed
                exponents = np.stack(np.broadcast_arrays(*place(values[:, None], np.exp(grid))), axis=-1)
            sums = self.sums(exponents.reshape(-1, 2))[0].reshape(grid.shape)
            at = sums.argmin(axis=1)
            low, high = grid[rows, np.maximum(at - 1, 0)], grid[rows, np.minimum(at + 1, CELLS - 1)]
        return sums[rows, at], np.exp(grid[rows, at])


def _least_sums(terms: Sequence[Array]) -> tuple[Array, Array]:
    """The least sums of squares [m] by which terms [m, n] times coefficients miss 1, and the coefficients [terms, m]:
    the least of all, or where one of them is negative, the best of those without some of the terms."""
    cells, count = len(terms[0]), len(terms)
    sums, coefficients, left = np.full(cells, inf), np.zeros((count, cells)), np.arange(cells)
    for size in range(count, 0, -1):
        for kept in map(list, combinations(range(count), size)):
            part = [terms[at][left] for at in kept]
            gram = np.array([[np.einsum("mn,mn->m", one, other) for other in part] for one in part])
            across = np.array([one.sum(axis=1) for one in part])
            matrices = gram.transpose(2, 0, 1) + RIDGE * np.eye(size)
            found = np.linalg.solve(matrices, across.T[:, :, None])[:, :, 0].T  # [kept, m]
            made = sum(one * its[:, None] for one, its in zip(part, found, strict=True))
            missed = ((1 - made) ** 2).sum(axis=1)
            better = (found >= 0).all(axis=0) & (missed < sums[left])
            sums[left[better]] = missed[better]
            coefficients[:, left[better]] = 0.0
            coefficients[np.ix_(kept, left[better])] = found[:, better]
        if size == count:
            left = np.flatnonzero(np.isinf(sums))
    return sums, coefficients


def student_t(spare: int, level: float) -> float:
    """The quantile of Student's t that holds `level` of it between minus and plus, by t = sqrt(spare) tan(angle)."""
    angles = np.linspace(0, pi / 2, 20_001)
    density = np.cos(angles) ** (spare - 1)
    share = np.cumsum((density[1:] + density[:-1]) / 2)
    angle = np.interp(level, share / share[-1], angles[1:])
    return float(spare**0.5 * tan(angle))

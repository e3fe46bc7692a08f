"""Thinned numbers lose no peak, whatever the length of a run."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.observe.run_data import MOST_POINTS, Series

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3 * MOST_POINTS)


@given(VALUES, st.integers(1, 1000))
def test_least_greatest_and_mean_survive_and_the_length_is_bounded(values: list[float], every: int) -> None:
    series = Series()
    for at, value in enumerate(values, 1):
        series.add(at * every, value)
        series.add(at * every, math.nan)  # leaves no trace
    steps, means, low, high = zip(*series.points(), strict=True)
    assert MOST_POINTS / 2 <= len(steps) <= MOST_POINTS or len(steps) == len(values)
    assert (min(low), max(high)) == (min(values), max(values))
    assert list(steps) == sorted({*steps})
    if len(steps) == len(values):
        assert list(means) == values
        assert (steps[0], steps[-1]) == (every, len(values) * every)
    assert all(least <= mean + 1e-6 and mean <= most + 1e-6 for mean, least, most in zip(means, low, high, strict=True))


def test_a_single_spike_among_a_hundred_thousand_steps_is_seen() -> None:
    series = Series()
    for step in range(1, 100_001):
        series.add(step, 50.0 if step == 77_777 else 2.0)
    (spike,) = [point for point in series.points() if point[3] == 50.0]
    assert spike[0] == pytest.approx(77_777, abs=300)
    assert len(series.points()) <= MOST_POINTS
    assert Series().points() == []

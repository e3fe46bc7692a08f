"""Thinned figures lose no peak, whatever the length of a run."""

import math

from hypothesis import given
from hypothesis import strategies as st

from megalite.observe.run_data import MOST_BUCKETS, Series

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3 * MOST_BUCKETS)


@given(VALUES, st.integers(1, 1000))
def test_least_greatest_and_mean_survive_and_the_length_is_bounded(values: list[float], every: int) -> None:
    series = Series()
    for at, value in enumerate(values, 1):
        series.add(at * every, value)
    assert len(series.buckets) <= MOST_BUCKETS
    assert min(bucket.low for bucket in series.buckets) == min(values)
    assert max(bucket.high for bucket in series.buckets) == max(values)
    assert sum(bucket.size for bucket in series.buckets) == len(values)
    assert math.isclose(sum(bucket.total for bucket in series.buckets), math.fsum(values), rel_tol=1e-9, abs_tol=1e-3)
    assert [bucket.first for bucket in series.buckets] == sorted({bucket.first for bucket in series.buckets})
    assert (series.buckets[0].first, series.buckets[-1].last) == (every, len(values) * every)


def test_a_single_spike_among_a_hundred_thousand_steps_is_seen() -> None:
    series = Series()
    for step in range(1, 100_001):
        series.add(step, 50.0 if step == 77_777 else 2.0)
    (spike,) = [bucket for bucket in series.buckets if bucket.high == 50.0]
    assert spike.first <= 77_777 <= spike.last
    assert MOST_BUCKETS / 2 <= len(series.buckets) <= MOST_BUCKETS


def test_what_is_not_finite_leaves_no_trace() -> None:
    series = Series()
    for step, value in enumerate([1.0, math.nan, math.inf, 3.0], 1):
        series.add(step, value)
    assert [(bucket.first, bucket.y) for bucket in series.buckets] == [(1, 1.0), (4, 3.0)]

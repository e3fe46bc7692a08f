"""The learning rate's shape: known values, and what holds for every schedule."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.compose import load_config
from megalite.config.schema import LearningRateConfig
from megalite.optim.schedule import decay_factor, learning_rate
from tests.config.refusal import refusal

PEAK = 1e-3
SCHEDULES = ("constant", "linear", "cosine", "wsd")


def rates(schedule: str, *, steps: int, warmup: int = 0, lowest: float = 1e-4, decay: int = 0) -> list[float]:
    config = LearningRateConfig(schedule, warmup, lowest, decay)
    return [learning_rate(step, config, peak=PEAK, steps=steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_rises_in_equal_parts_and_the_step_after_it_is_at_the_peak(schedule: str) -> None:
    assert rates(schedule, steps=100, warmup=4, decay=10)[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])


@pytest.mark.parametrize(
    ("schedule", "changes", "expected"),
    [
        ("constant", {"steps": 3}, [1e-3] * 3),
        ("cosine", {"steps": 1}, [1e-3]),
        ("cosine", {"steps": 3}, [1e-3, 5.5e-4, 1e-4]),
        ("linear", {"steps": 4}, [1e-3, 7e-4, 4e-4, 1e-4]),
        ("wsd", {"steps": 10, "warmup": 1, "decay": 3}, [5e-4, *[1e-3] * 6, 7e-4, 4e-4, 1e-4]),
        ("wsd", {"steps": 6, "warmup": 2, "decay": 5}, [1e-3 / 3, 2e-3 / 3, 1e-3, 7e-4, 4e-4, 1e-4]),
    ],
)
def test_known_rates(schedule: str, changes: dict[str, int], expected: list[float]) -> None:
    assert rates(schedule, **changes) == pytest.approx(expected)  # type: ignore[arg-type]


def test_nanogpt_recipe() -> None:
    """Its own formula, which decays over `lr_decay_iters` = 1,999 here, the number of its last iteration."""
    values = rates("cosine", steps=2000, warmup=100)
    assert values[0] == pytest.approx(PEAK * 1 / 101)
    assert values[100] == PEAK
    assert values[1050] == pytest.approx(1e-4 + 0.5 * (1 + math.cos(math.pi * 950 / 1899)) * 9e-4)
    assert values[1999] == pytest.approx(1e-4)


@given(
    schedule=st.sampled_from(SCHEDULES),
    steps=st.integers(1, 300),
    share=st.floats(0, 1),
    lowest=st.floats(0, PEAK),
    decay=st.integers(0, 300),
)
def test_every_schedule_rises_then_falls_within_its_bounds_and_ends_as_promised(
    schedule: str, steps: int, share: float, lowest: float, decay: int
) -> None:
    warmup = int(share * steps)
    values = rates(schedule, steps=steps, warmup=warmup, lowest=lowest, decay=decay)
    assert all(0 < value <= PEAK or value == lowest for value in values)
    assert all(earlier < later for earlier, later in pairwise(values[: warmup + 1]))
    after = values[warmup:]
    assert all(earlier >= later for earlier, later in pairwise(after))
    if len(after) > 1 and schedule != "constant" and not (schedule == "wsd" and decay == 0):
        assert values[-1] == lowest
    config = LearningRateConfig(schedule, warmup, lowest, decay)
    assert learning_rate(steps + 7, config, peak=PEAK, steps=steps) == values[-1]


@given(
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=6, unique=True).map(sorted),
    factors=st.lists(st.floats(0, 3), min_size=6, max_size=6),
    steps=st.integers(1, 60),
)
def test_a_table_is_interpolated_over_the_steps(shares: list[float], factors: list[float], steps: int) -> None:
    table = [[share, factor] for share, factor in zip(shares, factors, strict=False)]
    config = LearningRateConfig("table", 7, 1e-4, 5, table)
    found = [learning_rate(step, config, peak=PEAK, steps=steps) for step in range(steps + 1)]
    wanted = PEAK * np.interp(np.arange(steps) / max(steps - 1, 1), shares, factors[: len(shares)])
    assert found == pytest.approx([*wanted, wanted[-1]], rel=1e-9, abs=1e-18)


def test_a_table_says_the_warm_up_too_and_ends_with_the_last_step() -> None:
    config = LearningRateConfig("table", 3, 1e-4, 0, [[0.0, 0.25], [0.5, 1.0], [1.0, 0.0]])
    rates = [learning_rate(step, config, peak=PEAK, steps=5) for step in range(5)]
    assert rates == pytest.approx([0.25 * PEAK, 0.625 * PEAK, PEAK, 0.5 * PEAK, 0.0])


@pytest.mark.parametrize("table", ["[0,1]", "[[0,x]]", "[[0,null]]", "[[0,true]]", "[[[0,1]]]", "0.5", "{a: 1}"])
def test_a_table_is_a_list_of_lists_of_numbers(table: str) -> None:
    (problem,) = refusal("lr.schedule=table", f"lr.table={table}").problems
    assert (problem.setting, problem.rule) == ("lr.table", "must be a list of lists of numbers")
    assert problem.hint == "lr.table=[[0,0.1],[0.05,1],[1,0]]"
    assert load_config(["lr.schedule=table", problem.hint], 1).lr.table == [[0.0, 0.1], [0.05, 1.0], [1.0, 0.0]]


def test_a_recipe_for_a_longer_run_takes_a_table() -> None:
    """Neither the recipe's warm-up nor a least rate have an effect then."""
    words = ["experiment=shakespeare_char", "train.steps=50", "lr.schedule=table", "lr.table=[[0,1]]", "data.path=*.md"]
    assert load_config(words, 1).lr.table == [[0.0, 1.0]]


def test_weight_decay_is_constant_falls_towards_zero_or_follows_the_rate() -> None:
    lrs = [PEAK / 2, PEAK, 0.7 * PEAK, 0.1 * PEAK, 0.1 * PEAK]  # the last one is beyond the run

    def factors(schedule: str) -> list[float]:
        return [decay_factor(step, schedule, lr=lr, peak=PEAK, steps=4) for step, lr in enumerate(lrs)]

    assert factors("constant") == [1.0] * 5
    assert factors("to_zero") == [1.0, 0.75, 0.5, 0.25, 0.25]
    assert factors("with_lr") == pytest.approx([0.5, 1.0, 0.7, 0.1, 0.1], rel=1e-15)

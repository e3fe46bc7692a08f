"""Which samples a step takes: how batches grow, and that the number of consumed samples is all there is to know."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from megalite.config.schema import TrainConfig
from megalite.config.step_plan import PlannedStep, batch_sizes, planned_steps, ramp_flaw


def plan(train: TrainConfig, steps: int, *, done: int = 0, samples: int = 0) -> list[PlannedStep]:
    return list(islice(planned_steps(train, done=done, samples=samples), steps))


def sizes(train: TrainConfig, steps: int) -> list[int]:
    return [step.sequences for step in plan(train, steps)]


@st.composite
def ramps(draw: st.DrawFn) -> TrainConfig:
    start, increment, increments = (draw(st.integers(1, 12)) for _ in range(3))
    samples = draw(st.integers(1, 400))
    return TrainConfig(global_batch_size=start + increments * increment, batch_ramp=[start, increment, samples])


def test_batches_grow_at_equal_distances_in_samples() -> None:
    train = TrainConfig(global_batch_size=8, batch_ramp=[2, 2, 30])  # larger from samples 10, 20 and 30 on
    assert sizes(train, 11) == [2] * 5 + [4] * 3 + [6] * 2 + [8]  # which begin at samples 0, 10, 22 and 34


@given(ramps(), st.integers(0, 1000))
def test_a_batch_is_as_large_as_megatrons_at_the_same_sample(train: TrainConfig, first: int) -> None:
    """Its `--rampup-batch-size`, with fractions in place of its floats."""
    from fractions import Fraction

    assert train.batch_ramp is not None
    start, increment, samples = train.batch_ramp
    full = train.global_batch_size
    for_each_increment = Fraction(samples, (full - start) // increment)
    size = full if first > samples else start + int(first / for_each_increment) * increment
    assert plan(train, 1, samples=first)[0].sequences == size


@given(ramps(), st.integers(1, 60))
def test_a_run_that_continues_needs_only_the_samples_consumed(train: TrainConfig, done: int) -> None:
    whole = plan(train, done + 20)
    assert plan(train, 20, done=done, samples=whole[done].first) == whole[done:]


def test_a_step_that_is_passed_over_consumes_its_samples() -> None:
    train = TrainConfig(global_batch_size=8, batch_ramp=[2, 2, 30])
    skipping = TrainConfig(global_batch_size=8, batch_ramp=[2, 2, 30], skip_steps=[6, 2])
    assert [step.step for step in plan(skipping, 9) if step.skipped] == [2, 6]
    assert [(step.first, step.sequences) for step in plan(skipping, 9)] == [
        (step.first, step.sequences) for step in plan(train, 9)
    ]


def test_numbers_that_are_no_ramp_have_no_sizes_but_the_full_one() -> None:
    train = TrainConfig(global_batch_size=8, batch_ramp=[3, 2, 30])
    assert list(batch_sizes(train)) == [8]
    assert "must lead from 3" in str(ramp_flaw(train))

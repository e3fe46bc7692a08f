"""Which samples a step takes: how batches grow, and that the number of consumed samples is all there is to know."""

from dataclasses import replace
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from megalite.config.schema import Config, LearningRateConfig, TrainConfig
from megalite.config.step_plan import (
    PlannedStep,
    batch_sizes,
    due_after,
    known_steps,
    newest_step,
    planned_steps,
    ramp_flaw,
    samples_after,
    steps_to,
    warmup_and_decay,
)


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


def megatron_sizes(train: TrainConfig, steps: int) -> list[int]:
    """The size of each step, one after the other, in fractions."""
    from fractions import Fraction

    found, consumed, full = list[int](), 0, train.global_batch_size
    for _ in range(steps):
        size = full
        if train.batch_ramp is not None and consumed < train.batch_ramp[2]:
            start, increment, samples = train.batch_ramp
            size = start + int(consumed / Fraction(samples, (full - start) // increment)) * increment
        found.append(size)
        consumed += size
    return found


@given(ramps() | st.integers(1, 9).map(lambda size: TrainConfig(global_batch_size=size)), st.integers(0, 3000))
def test_the_least_number_of_steps_reaches_the_samples(train: TrainConfig, wanted: int) -> None:
    consumed = steps = 0
    for size in megatron_sizes(train, 3001):
        if consumed >= wanted:
            break
        consumed, steps = consumed + size, steps + 1
    assert steps_to(train, wanted) == steps
    assert samples_after(train, steps) == consumed
    half, samples = steps // 2, sum(megatron_sizes(train, steps // 2))
    assert steps_to(train, wanted, done=half, samples=samples) == steps
    assert samples_after(train, steps, done=half, samples=samples) == consumed
    assert steps_to(train, 0, done=half, samples=samples) == half, "what is done is done"


def test_the_steps_of_a_run_are_counted_at_any_length() -> None:
    train = TrainConfig(global_batch_size=1024, seq_length=4096, batch_ramp=[32, 32, 10**7])
    grown = steps_to(train, 10**7)
    assert steps_to(train, 10**15) == grown + -(-(10**15 - samples_after(train, grown)) // 1024)


def test_tokens_are_whole_sequences_and_steps() -> None:
    for tokens, steps in ((1, 1), (64, 1), (65, 2), (640, 10), (641, 11)):
        assert known_steps(TrainConfig(global_batch_size=4, seq_length=16, tokens=tokens)) == steps
    skipping = TrainConfig(global_batch_size=4, seq_length=16, tokens=640, skip_steps=[2, 3])
    assert known_steps(skipping) == 10, "a step that is passed over consumes its samples"
    assert known_steps(TrainConfig()) == 200
    assert known_steps(TrainConfig(steps=0)) == 0
    others = (TrainConfig(tokens_per_parameter=1.0), TrainConfig(flops=1.0), TrainConfig(epochs=1.0))
    assert [known_steps(train) for train in others] == [None] * 3


@given(ramps(), st.integers(1, 50), st.integers(1, 900), st.integers(1, 3))
def test_what_is_due_by_tokens_comes_after_the_step_that_passes_a_multiple(
    train: TrainConfig, steps: int, every: int, length: int
) -> None:
    train, consumed = replace(train, seq_length=length), 0
    for at, planned in enumerate(plan(train, steps)):
        before, consumed = consumed, consumed + megatron_sizes(train, at + 1)[-1] * length
        passed = any(token % every == 0 for token in range(before + 1, consumed + 1))
        assert due_after(planned, train, 0, every) is passed
        assert due_after(planned, train, 3, None) is (planned.step % 3 == 0)
        assert not due_after(planned, train, 0, None)
        assert newest_step(train, planned.step, consumed // length) == planned


@given(ramps(), st.integers(1, 60), st.integers(0, 400), st.integers(1, 3))
def test_tokens_of_warm_up_and_decay_are_the_first_and_last_steps(
    train: TrainConfig, steps: int, tokens: int, length: int
) -> None:
    sizes = [length * size for size in megatron_sizes(train, steps)]
    lr = LearningRateConfig(warmup_tokens=min(tokens, sum(sizes)), decay_tokens=min(tokens, sum(sizes)))
    warmup, decay = warmup_and_decay(Config(train=replace(train, seq_length=length), lr=lr), steps)
    assert warmup == next(n for n in range(steps + 1) if sum(sizes[:n]) >= min(tokens, sum(sizes)))
    assert decay == next(n for n in range(steps + 1) if sum(sizes[steps - n :]) >= min(tokens, sum(sizes)))
    lr = replace(lr, decay_tokens=sum(sizes) + 1)
    assert warmup_and_decay(Config(train=replace(train, seq_length=length), lr=lr), steps)[1] == steps + 1


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

"""The window of spikes against Python's statistics, for any sequence of losses and norms."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.schema import TrainConfig
from megalite.optim.spikes import SpikeWindow

Step = tuple[float, float, bool]  # loss, gradient norm, whether it is skipped for another reason
VALUES = st.one_of(st.floats(0, 10), st.sampled_from([1.0, 1e3, float("nan"), float("inf")]))


def window(sigmas: float = 3.0, size: int = 8) -> SpikeWindow:
    return SpikeWindow(TrainConfig(skip_spikes=sigmas, spike_window=size), torch.device("cpu"))


def skips(spikes: SpikeWindow, loss: float, norm: float, skipped: bool = False) -> bool:
    numbers = [torch.tensor(value, dtype=torch.float64) for value in (loss, norm)]
    return bool(spikes.skips(*numbers, torch.tensor(skipped)))


def limit(values: list[float], sigmas: float) -> float:
    return statistics.fmean(values) + sigmas * statistics.stdev(values)


@given(st.lists(st.tuples(VALUES, VALUES, st.booleans()), max_size=40), st.sampled_from([0.5, 2.0, 6.0]))
def test_every_sequence_is_judged_by_mean_and_deviation_of_what_was_applied(steps: list[Step], sigmas: float) -> None:
    spikes, applied = window(sigmas, size=7), list[tuple[float, float]]()
    for loss, norm, other in steps:
        bad = other or not (abs(loss) < float("inf") and abs(norm) < float("inf"))
        newest, near = applied[-7:], False
        expected = bad
        if len(newest) >= 4 and not bad:
            for value, values in zip((loss, norm), zip(*newest, strict=True), strict=True):
                expected |= value > (most := limit([*values], sigmas))
                near |= abs(value - most) <= 1e-9 * max(1.0, most)  # rounding decides
        found = skips(spikes, loss, norm, bad)
        assert found == expected or near
        applied += [] if found else [(loss, norm)]
        assert spikes.known() == [[*step] for step in applied[-7:]]


@given(st.lists(st.floats(0.1, 10), min_size=4, max_size=8, unique=True), st.sampled_from([0.5, 2.0, 6.0]))
def test_the_limit_is_exact(values: list[float], sigmas: float) -> None:
    for factor, expected in ((1 - 1e-9, False), (1 + 1e-9, True)):
        spikes = window(sigmas)
        spikes.fill([(value, 1.0) for value in values])
        assert skips(spikes, limit(values, sigmas) * factor, 0.0) == expected


def test_nothing_is_judged_before_half_of_the_window_is_known() -> None:
    spikes = window(size=9)
    assert not any(skips(spikes, value, value) for value in (1.0, 2.0, 1e3, 1.0, 1e6))
    assert skips(spikes, 1e9, 1.0)


@pytest.mark.parametrize("numbers", [(1e3, 1.0), (1.0, 1e3)])
def test_loss_and_norm_are_judged_each_for_itself_and_only_above(numbers: tuple[float, float]) -> None:
    spikes = window()
    assert not any(skips(spikes, 1 + at % 2 / 10, 1 + at % 2 / 10) for at in range(8))
    assert not skips(spikes, 0.0, 0.0)
    assert [skips(spikes, *numbers) for _ in range(20)] == [True] * 20, "spikes do not raise the limit"


def test_what_a_checkpoint_holds_gives_the_same_window_bit_for_bit() -> None:
    saved, larger, smaller = window(), window(size=20), window(size=5)
    for at in range(11):
        skips(saved, 1 / (at + 3), 0.1 * at)
    for other in (same := window(), larger, smaller):
        skips(other, 7.0, 7.0)
        other.fill(saved.known())
    assert torch.equal(same.values, saved.values)
    assert larger.known() == saved.known()
    assert smaller.known() == saved.known()[-5:]
    smaller.fill([])
    assert smaller.known() == []

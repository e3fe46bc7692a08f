"""The loss scale against the same rule in plain Python, for any sequence of overflows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.schema import OptimizerConfig
from megalite.optim.loss_scale import LossScale

CPU = torch.device("cpu")

SEQUENCES = st.lists(st.booleans(), max_size=40)


class PlainScale:
    """The rule on plain numbers, one branch per sentence of it; chances go on falling below zero."""

    def __init__(self, initial: float, window: int, hysteresis: int, minimum: float) -> None:
        self.scale, self.good, self.chances = initial, 0, hysteresis
        self.window, self.hysteresis, self.minimum = window, hysteresis, minimum

    def update(self, overflow: bool) -> None:
        if overflow:
            self.good = 0
            self.chances -= 1
            if self.chances <= 0:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self.good += 1
        if self.good == self.window:
            self.good = 0
            self.chances = self.hysteresis
            self.scale = self.scale * 2


def build(*, initial: float = 2.0**16, window: int = 3, hysteresis: int = 2, minimum: float = 1.0) -> LossScale:
    return on(CPU, initial, window, hysteresis, minimum)


def on(device: torch.device, initial: float, window: int, hysteresis: int, minimum: float) -> LossScale:
    settings = OptimizerConfig(
        initial_loss_scale=initial, loss_scale_window=window, hysteresis=hysteresis, min_loss_scale=minimum
    )
    return LossScale(settings, device)


def after(scale: LossScale, steps: str) -> float:
    """The scale after steps, each good (.) or an overflow (x)."""
    for step in steps:
        scale.update(torch.tensor(float(step == "x")))
    return scale.state[0].item()


@given(SEQUENCES, st.integers(1, 5), st.integers(1, 4), st.sampled_from([1.0, 2.0**14, 2.0**16]))
def test_every_sequence_of_overflows_gives_the_scale_of_the_rule(
    overflows: list[bool], window: int, hysteresis: int, minimum: float
) -> None:
    ours = build(window=window, hysteresis=hysteresis, minimum=minimum)
    plain = PlainScale(2.0**16, window, hysteresis, minimum)
    for overflow in overflows:
        ours.update(torch.tensor(float(overflow)))
        plain.update(overflow)
        assert ours.state.tolist() == [plain.scale, plain.good, max(plain.chances, 0)]
        assert ours.state[0].item() == plain.scale


def test_a_shorter_window_after_a_resume_is_full_at_the_next_good_step() -> None:
    longer, shorter = build(window=10), build(window=3)
    after(longer, "." * 7)
    shorter.state.copy_(longer.state)
    assert after(shorter, ".") == 2.0**17


@pytest.mark.gpu
def test_an_update_does_not_wait_for_the_device() -> None:
    scale = on(torch.device("cuda"), 2.0**16, window=1, hysteresis=1, minimum=1.0)
    good, bad = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        scale.update(good)
        scale.update(bad)
        scale.update(bad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scale.state[0].item() == 2.0**15

"""Stop signals are remembered, repeated ones change nothing, and a third Ctrl-C ends the wait."""

import os
import signal

import pytest

from megalite.train.signals import STOP_SIGNALS, StopRequest


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_only_sets_the_request_and_the_old_handler_comes_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == number.name
    assert signal.getsignal(number) == before


def test_the_third_interrupt_does_not_wait_for_the_step() -> None:
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)

"""Stop signals are remembered, repeated ones change nothing, and a third Ctrl-C ends the wait."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megalite.launch.process import INTERRUPTED, LAUNCHER_ENDED, STOP_SIGNALS, stop_request


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("nohup", [False, True])
def test_a_signal_only_sets_the_request_and_the_old_handler_comes_back(number: signal.Signals, nohup: bool) -> None:
    """Under nohup a terminal that goes away stops nothing."""
    own = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    ignored = nohup and number == signal.SIGHUP
    before = [signal.getsignal(stop) for stop in STOP_SIGNALS]
    try:
        with stop_request() as stop:
            assert stop.requested is None
            os.kill(os.getpid(), number)
            assert stop.requested == (None if ignored else number.name)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested == ("SIGTERM" if ignored else number.name)
        assert [signal.getsignal(stop) for stop in STOP_SIGNALS] == before
    finally:
        signal.signal(signal.SIGHUP, own)


def test_the_end_of_the_launcher_stops_in_order() -> None:
    with stop_request() as stop:
        for _ in range(2):
            os.kill(os.getpid(), LAUNCHER_ENDED)
            time.sleep(0.1)
        assert stop.requested == "the end of torchrun"


@pytest.mark.skipif(sys.platform != "linux", reason="knows the mutex of glibc")
@pytest.mark.parametrize("numbers", [[signal.SIGINT] * 3, [signal.SIGINT, LAUNCHER_ENDED]])
def test_the_third_interrupt_or_the_launcher_s_end_after_one_does_not_wait_for_the_main_thread(
    numbers: list[signal.Signals],
) -> None:
    code = """
import ctypes
from megalite.launch.process import stop_request
with stop_request():
    print("waiting", flush=True)
    mutex = ctypes.create_string_buffer(64)  # zeros are an unlocked mutex
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)  # the second one waits for ever, whatever signals come
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.2)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.05)
    assert process.wait(timeout=10) == INTERRUPTED

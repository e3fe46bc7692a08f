"""What a log says of long work on data: how far it is, and an honest time that is left."""

import io

import pytest

from megalite.observe import terminal as module
from megalite.observe.terminal import Terminal


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module.time, "monotonic", made)
    return made


def test_the_time_left_is_that_of_this_process_alone(clock: Clock) -> None:
    """600 of 1000 bytes were there before: nobody knows how long they took."""
    stream = io.StringIO()
    terminal = Terminal(stream, interactive=False)
    terminal.preparing(600, 1000, 60, 300)
    clock.now += 12
    terminal.preparing(700, 1000, 70, 350)
    clock.now += 1
    terminal.preparing(710, 1000, 71, 355)
    clock.now += 35
    terminal.preparing(1000, 1000, 100, 500)
    terminal.preparing(1000, 1000, 100, 500)
    assert stream.getvalue().splitlines() == [
        "preparing data: 700 B of 1.0 kB, 70 documents, 350 tokens  0:36 left",
        "prepared 1.0 kB: 100 documents, 500 tokens in 0:48",
    ]


def test_of_a_stream_only_what_is_done_is_known(clock: Clock) -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, interactive=False)
    terminal.preparing(0, 0, 0, 0)
    clock.now += 12
    terminal.preparing(5000, 0, 5, 50)
    assert stream.getvalue() == "preparing data: 5.0 kB, 5 documents, 50 tokens\n"


def test_a_scan_is_shown_alike(clock: Clock) -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, interactive=False)
    terminal.checking(100, 1000, 1, 50)
    clock.now += 20
    terminal.checking(400, 1000, 4, 200)
    terminal.checking(1000, 1000, 10, 500)
    assert stream.getvalue().splitlines() == [
        "checking tokens: 400 B of 1.0 kB, 4 documents, 200 tokens  0:40 left",
        "checked 1.0 kB: 10 documents, 500 tokens in 0:20",
    ]

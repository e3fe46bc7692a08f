"""What a log says of long work on data: how far it is, and once that it is done."""

import io

import pytest

from megalite.observe import terminal as module
from megalite.observe.terminal import Terminal


def test_a_log_tells_now_and_then_how_far_work_on_data_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    stream = io.StringIO()
    terminal = Terminal(stream, interactive=False)
    for show in (terminal.preparing, terminal.checking):
        for seconds, done, total in (
            (0, 600, 1000),
            (12, 700, 1000),
            (1, 710, 1000),
            (35, 1000, 1000),
            (0, 1000, 1000),
        ):
            now += seconds
            show(done, total, done // 10, done // 2)
    streamed = Terminal(stream, interactive=False).preparing  # whose end nobody knows
    for seconds in (0, 12):
        now += seconds
        streamed(5000, 0, 5, 50)
    assert stream.getvalue().splitlines() == [
        "preparing data: 700 bytes of 1.0 kB, 70 documents, 350 tokens",
        "prepared 1.0 kB: 100 documents, 500 tokens in 0:48",
        "checking tokens: 700 bytes of 1.0 kB, 70 documents, 350 tokens",
        "checked 1.0 kB: 100 documents, 500 tokens in 0:48",
        "preparing data: 5.0 kB, 5 documents, 50 tokens",
    ]

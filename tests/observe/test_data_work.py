"""What a log says of long work on data: how far it is, and once that it is done."""

import io

import pytest

from megalite.observe import terminal as module
from megalite.observe.terminal import Terminal


def test_a_log_tells_now_and_then_how_far_work_on_data_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    stream = io.StringIO()
    terminal = Terminal(stream)
    for show in (terminal.preparing, terminal.checking):
        for seconds, done in ((0, 600), (12, 700), (1, 710), (35, 1000), (0, 1000)):
            now += seconds
            show(done * 10**6, 10**9, done // 10, done // 2)
    streamed = Terminal(stream).preparing  # whose end nobody knows
    for seconds in (0, 12):
        now += seconds
        streamed(5 * 10**6, 0, 5, 50)
    assert stream.getvalue().splitlines() == [
        "preparing data: 700.0 MB of 1,000.0 MB, 70 documents, 350 tokens",
        "prepared 1,000.0 MB: 100 documents, 500 tokens in 0:48",
        "checking tokens: 700.0 MB of 1,000.0 MB, 70 documents, 350 tokens",
        "checked 1,000.0 MB: 100 documents, 500 tokens in 0:48",
        "preparing data: 5.0 MB, 5 documents, 50 tokens",
    ]

"""A tracker in the background never makes training wait and never ends it, whatever happens to it."""

import time
from collections.abc import Mapping
from threading import Event, Thread
from typing import Any

import pytest

from megalite.observe import background
from megalite.observe.background import BackgroundTracker, finish_trackers

PATIENCE_S = 30.0


class Collector:
    """Collects what it is told; fails at steps in `bad`, and waits for `gate` if there is one."""

    def __init__(self, bad: tuple[int, ...] = (), gate: Event | None = None) -> None:
        self.bad, self.gate = bad, gate
        self.seen: list[Any] = []

    def record(self, record: Mapping[str, Any]) -> None:
        if self.gate is not None:
            self.gate.wait(PATIENCE_S)
        if record["step"] in self.bad:
            raise RuntimeError("the network\nis gone")
        self.seen.append(record["step"])

    def sample(self, step: int, prompt: str, text: str) -> None:
        self.seen.append((step, prompt, text))

    def finish(self, status: int) -> None:
        self.seen.append(f"status {status}")


def test_everything_arrives_in_order() -> None:
    collector, told = Collector(), list[str]()
    tracker = BackgroundTracker("x", lambda tell: collector, told.append, "look there")
    tracker.record({"step": 1})
    tracker.sample(1, "a", "b")
    tracker.record({"step": 2})
    finish_trackers([tracker], 0)
    assert collector.seen == [1, (1, "a", "b"), 2, "status 0"]
    assert told == []


def test_a_recorder_that_fails_is_told_of_once_and_goes_on() -> None:
    collector, told = Collector(bad=(1, 3)), list[str]()
    tracker = BackgroundTracker("x", lambda tell: collector, told.append, "look there")
    for step in range(1, 5):
        tracker.record({"step": step})
    finish_trackers([tracker], 0)
    assert collector.seen == [2, 4, "status 0"]
    assert told == ["x: warning: RuntimeError: the network is gone; the run itself is not affected"]


def test_a_recorder_that_cannot_be_opened_costs_one_warning() -> None:
    def fail(tell: object) -> None:
        raise OSError("no room")

    told = list[str]()
    tracker = BackgroundTracker("x", fail, told.append, "look there")
    tracker.record({"step": 1})
    finish_trackers([tracker], 0)
    assert told == ["x: warning: OSError: no room; the run itself is not affected"]


@pytest.mark.parametrize("status", [0, 1])
def test_recorders_that_hang_hold_nothing_up_and_still_learn_of_the_end(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "FINISH_S" if status == 0 else "FAILED_S", 0.2)
    monkeypatch.setattr(background, "LONGEST_QUEUE", 100)
    gate, told = Event(), list[str]()
    collector = Collector(gate=gate)
    tracker = BackgroundTracker("x", lambda tell: collector, told.append, "look there")
    other = BackgroundTracker("y", lambda tell: Collector(gate=gate), lambda line: None, "look there")
    begin = time.monotonic()
    for step in range(1000):
        tracker.record({"step": step})
        other.record({"step": step})
    finish_trackers([tracker, other], status)
    assert time.monotonic() - begin < 0.35  # both at a time, not one after the other
    gate.set()
    tracker.wait(PATIENCE_S)
    assert collector.seen[-1] == f"status {status}"
    assert told == [
        "x: warning: it is too slow, and misses records; the run itself is not affected",
        "x: not done at the end of the run; look there",
    ]


def test_a_system_without_threads_costs_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", refuse)
    told = list[str]()
    tracker = BackgroundTracker("x", lambda tell: Collector(), told.append, "look there")
    for step in range(3):
        tracker.record({"step": step})
    finish_trackers([tracker], 0)
    assert told == ["x: warning: RuntimeError: can't start new thread; the run itself is not affected"]


def test_nothing_is_opened_before_the_first_record() -> None:
    opened = list[int]()
    tracker = BackgroundTracker("x", lambda tell: opened.append(1), lambda line: None, "look there")
    tracker.sample(0, "a", "b")
    finish_trackers([tracker], 1)
    assert opened == []

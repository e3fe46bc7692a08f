"""events.jsonl is the history of a run: nothing is cut, nothing of it can end a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.errors.problems import UserError
from megalite.observe.chronicle import EventsFile, MetricsFile, event
from megalite.observe.report.data import read_run
from megalite.train.history import read_events, read_metrics
from tests.train.runs import write_text
from tests.train.test_run import config_for, poison, start, stop_after


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("run") / "text.txt")


def kinds(run_dir: Path) -> list[tuple[str, int]]:
    told = ("ranks", "sample")
    return [(it["kind"], it["step"]) for it in read_events(run_dir / "events.jsonl") if it["kind"] not in told]


def test_what_a_killed_run_had_begun_stays_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1.0, "step": 3, "kind": "start"}\n{"time": 2.0, "st')
    events = EventsFile(tmp_path)
    events.append(event("resume", 3))
    assert [(it["kind"], it["step"]) for it in read_events(path)] == [("start", 3), ("resume", 3)]
    events.close()


def test_a_file_that_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(UserError, match="move it away"):
        EventsFile(tmp_path)


def test_a_run_that_stops_and_goes_on_tells_its_whole_story(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(text, tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_after(6, patch)
        assert start(config) == 0
    assert kinds(tmp_path / "run") == [("start", 0), ("checkpoint", 4), ("checkpoint", 7), ("stopped", 7)]
    assert read_run(tmp_path / "run").end is not None
    assert start(config) == 0
    assert kinds(tmp_path / "run")[4:] == [("resume", 7), ("checkpoint", 8), ("checkpoint", 12), ("finished", 12)]
    assert start(config) == 0  # nothing left to do
    assert len(kinds(tmp_path / "run")) == 8
    (first, *_) = read_events(tmp_path / "run" / "events.jsonl")
    assert {"torch", "python"} <= set(first["versions"])
    assert first["layout"]["dp"] == 1
    assert len(first["hosts"]) == 1
    report = (tmp_path / "run" / "report.html").read_text()
    assert "finished" in report
    assert "by SIGUSR1" in report


def test_bad_steps_and_the_end_of_a_run_that_gives_up_are_told(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(set(range(4 * 5, 1000)), monkeypatch)  # from step 6 on
    assert start(config_for(text, tmp_path / "run", max_bad_steps=2)) == 1
    assert kinds(tmp_path / "run") == [("start", 0), ("checkpoint", 4), ("skipped", 6), ("skipped", 7), ("failed", 7)]
    *_, failed = read_events(tmp_path / "run" / "events.jsonl")
    assert "2 steps in a row" in failed["message"]
    report = (tmp_path / "run" / "report.html").read_text()
    assert "2 steps in a row" in report
    assert ">failed<" in report


def test_an_error_of_any_kind_is_in_the_report(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("the device fell <off> the bus")

    monkeypatch.setattr("megalite.train.loop.evaluate", broken)
    with pytest.raises(RuntimeError, match="off"):
        start(config_for(text, tmp_path / "run"))
    assert kinds(tmp_path / "run")[-1] == ("failed", 4)
    assert "RuntimeError: the device fell &lt;off&gt; the bus" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_full_disk_costs_lines_and_is_told_once_until_it_has_room_again(
    name: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind: type = MetricsFile if name == "metrics.jsonl" else EventsFile
    append = kind.append
    full = (3, 4, 5, 8)

    def without_room(self: Any, record: dict[str, Any]) -> None:
        if record["step"] in full:
            raise OSError(28, "No space left on device")
        append(self, record)

    monkeypatch.setattr(kind, "append", without_room)
    config = config_for(text, tmp_path / "run", log_interval=1, max_bad_steps=100)
    poison(set(range(8, 32)), monkeypatch)  # steps 3 to 8 are events
    assert start(config) == 0
    lines = read_metrics if name == "metrics.jsonl" else lambda path: list(read_events(path))
    assert not {line["step"] for line in lines(tmp_path / "run" / name)} & {*full}
    assert {line["step"] for line in lines(tmp_path / "run" / name)} >= {6, 7, 12}
    assert capsys.readouterr().out.count(f"{name} cannot be written for now: No space left") == 2
    assert (tmp_path / "run" / "report.html").is_file()


class Tracker:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def record(self, record: Any) -> None:
        self.told.append(("record", record))

    def sample(self, step: int, prompt: str, text: str) -> None:
        self.told.append(("sample", step, prompt, text))

    def finish(self, status: int) -> None:
        self.told.append(("finish", status))

    def wait(self, seconds: float) -> None:
        self.told.append(("wait", seconds > 0))


def test_a_tracker_is_told_what_is_in_the_files_in_their_order(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker()
    config = config_for(text, tmp_path / "run", sample_interval=8)
    monkeypatch.setattr("megalite.observe.trackers.open_trackers", lambda *_: [tracker])
    assert start(config) == 0
    lines = [line for what, line, *_ in tracker.told if what == "record"]
    assert json.dumps(lines) == json.dumps(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    samples = [told[1:] for told in tracker.told if told[0] == "sample"]
    events = [it for it in read_events(tmp_path / "run" / "events.jsonl") if it["kind"] == "sample"]
    assert samples == [(it["step"], it["prompt"], it["text"]) for it in events]
    assert [step for step, *_ in samples] == [8, 12]
    assert tracker.told[-2:] == [("finish", 0), ("wait", True)]


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "straggler", "rank": None, "host": "n1", "times": 1.5},
        {"kind": "straggler", "rank": 1, "host": "n1", "times": None},
        {"kind": "sample", "prompt": 3, "text": "x"},
        {"kind": "checkpoint", "bytes": "many", "seconds": 1.0, "stall_s": 0.0},
        {"kind": "ranks", "memory_gib": 1.0, "compute_s": []},
        {"kind": "start", "time": "yesterday"},
        {"kind": "start", "step": "3"},
        {"kind": "start", "step": -3},
        {"kind": "start", "hosts": "n1"},
        {"kind": "start", "about": [["model", 3]]},
        {"kind": "start", "overrides": [1]},
        {"kind": "skipped", "loss_scale": "high"},
        {"kind": "profile", "parts": {"forward": "long"}},
        {"kind": "ranks", "memory_gib": ["much"], "compute_s": [1.0]},
        {"kind": 7},
    ],
    ids=str,
)
def test_a_damaged_event_is_passed_over_and_named(tmp_path: Path, damage: dict[str, Any]) -> None:
    lines = [event("stopped", 3), {**event("start", 4), **damage}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path, told = tmp_path / "events.jsonl", list[str]()
    assert [it["kind"] for it in read_events(path, told.append)] == ["stopped"]
    assert told == [f"{path}: no valid record in line 2; left out"]

"""events.jsonl is the history of a run: nothing is cut, nothing of it can end a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.observe.run_data import read_run
from megalite.train.history import read_events, read_metrics
from megalite.train.run_log import RecordFile
from tests.train.runs import write_text
from tests.train.test_run import config_for, poison, start, stop_after


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("run") / "text.txt")


def kinds(run_dir: Path) -> list[tuple[str, int]]:
    left_out = ("ranks", "sample")
    return [(it["kind"], it["step"]) for it in read_events(run_dir / "events.jsonl") if it["kind"] not in left_out]


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


class Full:
    """A file on a full disk."""

    def write(self, text: str) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_full_disk_costs_lines_and_is_told_once_until_it_has_room_again(
    name: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append = RecordFile.append
    full = (3, 4, 5, 8)

    def without_room(self: RecordFile, record: dict[str, Any]) -> None:
        if record["step"] in full and self.path.name == name:
            with monkeypatch.context() as patch:
                patch.setattr(self, "_file", Full())
                append(self, record)
        else:
            append(self, record)

    monkeypatch.setattr(RecordFile, "append", without_room)
    config = config_for(text, tmp_path / "run", log_interval=1, max_bad_steps=100)
    poison(set(range(8, 32)), monkeypatch)  # steps 3 to 8 are events
    assert start(config) == 0
    lines = read_metrics if name == "metrics.jsonl" else lambda path: list(read_events(path))
    assert not {line["step"] for line in lines(tmp_path / "run" / name)} & {*full}
    assert {line["step"] for line in lines(tmp_path / "run" / name)} >= {6, 7, 12}
    assert capsys.readouterr().out.count(f"{name} cannot be written for now: No space left") == 2
    assert (tmp_path / "run" / "report.html").is_file()


class Trackers:
    """Keeps what it is given."""

    name = "trackers"

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.ends: list[int] = []

    def add(self, line: Any) -> None:
        self.lines.append(line)

    def close(self) -> None:
        self.ends.append(0)


def test_trackers_get_what_is_in_the_files_in_their_order(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers = Trackers()
    config = config_for(text, tmp_path / "run", sample_interval=8)
    monkeypatch.setattr("megalite.observe.about.open_trackers", lambda *_: trackers)
    assert start(config) == 0
    records, events = ([it for it in trackers.lines if ("kind" in it) == wanted] for wanted in (False, True))
    assert json.dumps(records) == json.dumps(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert json.dumps(events) == json.dumps(read_events(tmp_path / "run" / "events.jsonl"))
    assert [it["step"] for it in events if it["kind"] == "sample"] == [8, 12]
    assert trackers.ends == [0]

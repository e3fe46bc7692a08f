"""events.jsonl is the history of a run: nothing is cut, nothing of it can end a run."""

import json
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megalite import __version__
from megalite.observe.about import commit, versions
from megalite.observe.run_data import read_run
from megalite.train.history import RunLog, read_events, read_metrics
from tests.train.runs import write_text
from tests.train.test_bad_steps import poison
from tests.train.test_run import config_for, kinds, start, stop_after


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("run") / "text.txt")


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
    assert all(text in (tmp_path / "run" / "report.html").read_text() for text in ("finished", "by SIGUSR1"))


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
    append, full = RunLog.append, (3, 4, 5, 8)

    def without_room(self: RunLog, file: str, record: dict[str, Any]) -> None:
        with monkeypatch.context() as patch:
            if record["step"] in full and file == name:
                patch.setitem(self._files, name, Full())
            append(self, file, record)

    monkeypatch.setattr(RunLog, "append", without_room)
    config = config_for(text, tmp_path / "run", log_interval=1, max_bad_steps=100)
    poison(set(range(8, 32)), monkeypatch)  # steps 3 to 8 are events
    assert start(config) == 0
    lines = read_metrics if name == "metrics.jsonl" else lambda path: list(read_events(path))
    assert not {line["step"] for line in lines(tmp_path / "run" / name)} & {*full}
    assert {line["step"] for line in lines(tmp_path / "run" / name)} >= {6, 7, 12}
    assert capsys.readouterr().out.count(f"{name} cannot be written for now: No space left") == 2
    assert (tmp_path / "run" / "report.html").is_file()


def test_trackers_get_what_is_in_the_files_in_their_order(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers = Mock()
    config = config_for(text, tmp_path / "run", sample_interval=8)
    monkeypatch.setattr("megalite.observe.about.open_trackers", lambda *_: trackers)
    assert start(config) == 0
    lines = [call.args[0] for call in trackers.add.call_args_list]
    records, events = ([it for it in lines if ("kind" in it) == wanted] for wanted in (False, True))
    assert json.dumps(records) == json.dumps(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert json.dumps(events) == json.dumps(read_events(tmp_path / "run" / "events.jsonl"))
    assert [it["step"] for it in events if it["kind"] == "sample"] == [8, 12]
    assert lines[-1]["kind"] == "finished"


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def test_the_commit_of_a_checkout_and_whether_it_has_changes(tmp_path: Path) -> None:
    assert commit(tmp_path) == {}  # an installed megalite
    git(tmp_path, "init")
    assert commit(tmp_path) == {}  # no commit yet
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "tag", "-a", "v1", "-m", "a tag is not what is asked for")
    (clean,) = commit(tmp_path).values()
    assert len(clean) == 12
    assert set(clean) <= {*"0123456789abcdef"}
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == {"commit": f"{clean}-dirty"}


def test_the_version_is_known_without_an_installation() -> None:
    assert versions()["megalite"] == __version__

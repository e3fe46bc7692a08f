"""scripts/wandb_replay.py: what it sends, and what it refuses. (test_wandb.py has a replay with the real wandb.)"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.train.wandb_sender import sending
from scripts.wandb_replay import main
from tests.train.test_wandb import LINES, WITH_KEY, home_alone, make_run


class Service:
    """Takes the place of wandb: knows of each run how far it got, and can be away."""

    def __init__(self) -> None:
        self.away = self.without_tables = False
        self.steps: dict[str, list[int]] = {}

    def module(self) -> SimpleNamespace:
        return SimpleNamespace(init=self.init, Settings=dict, Table=dict, teardown=lambda: None)

    def init(self, **arguments: Any) -> SimpleNamespace:
        if self.away:
            raise TimeoutError("no answer")
        steps = self.steps.setdefault(arguments["id"], [])
        return SimpleNamespace(
            offline=False,
            url=f"https://here/{arguments['id']}",
            starting_step=max(steps, default=-1) + 1,
            log=lambda values, step: self.take(steps, values, step),
            finish=lambda exit_code: None,
        )

    def take(self, steps: list[int], values: dict[str, Any], step: int) -> None:
        if self.without_tables and "samples" in values:
            raise TimeoutError("no answer")
        steps.append(step)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Service:
    service = Service()
    kept = {"WANDB_DATA_DIR": "", "WANDB_CACHE_DIR": "", "WANDB_ERROR_REPORTING": ""}  # what a sender sets is put back
    home_alone(monkeypatch, tmp_path / "home", **WITH_KEY, **kept)
    monkeypatch.setattr("megalite.train.wandb_replay.wandb_is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "wandb", service.module())
    return service


def test_every_run_is_sent_under_its_id_and_no_step_twice(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (make_run(tmp_path / name, LINES) for name in ("one", "two"))
    (two / "wandb.json").write_text('{"id": "known"}\n')
    service.steps["known"] = [1, 2]
    assert main([str(one), str(two)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{one}: 3 steps sent: https://here/")
    assert second == f"{two}: 1 steps sent, 2 were there already: https://here/known"
    assert main([str(one), str(two)]) == 0
    assert list(service.steps.values()) == [[1, 2, 3], [1, 2, 3]]


def test_samples_that_wandb_does_not_take_cost_no_figures(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.without_tables = True
    folder = make_run(tmp_path / "run", LINES)
    (folder / "events.jsonl").write_text('{"kind": "sample", "step": 2, "prompt": "a", "text": "b"}\n')
    assert main([str(folder)]) == 0
    assert list(service.steps.values()) == [[1, 2, 3]]
    assert "the samples of step 2 are not sent" in capsys.readouterr().err


def test_a_service_that_is_away_is_a_failure_in_one_line(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.away = True
    assert main([str(make_run(tmp_path / "run", LINES))]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [f"megalite: {tmp_path / 'run'} was not sent: TimeoutError: no answer"]


REFUSED: list[tuple[str, Callable[[Path], object], dict[str, str], list[str]]] = [
    ("no folder", lambda run: None, {}, ["there is no such folder"]),
    ("an empty folder", lambda run: run.mkdir(), {}, ["no config.yaml and no metrics.jsonl"]),
    ("no steps", lambda run: make_run(run, []), {}, ["holds no steps"]),
    ("no key", lambda run: make_run(run, LINES), {"WANDB_API_KEY": ""}, ["no key is set up", "wandb login"]),
    ("disabled", lambda run: make_run(run, LINES), {"WANDB_MODE": "disabled"}, ["WANDB_MODE", "nothing would be sent"]),
]


@pytest.mark.parametrize(("make", "variables", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_cannot_be_sent_is_refused_before_anything_is_sent(
    make: Callable[[Path], object],
    variables: dict[str, str],
    words: list[str],
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path / "run")
    sound = make_run(tmp_path / "sound", LINES)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = sorted(tmp_path.rglob("*"))
    assert main([str(sound), str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "megalite: refused, 1 problem:" in said
    assert all(word in said for word in words), said
    assert sorted(tmp_path.rglob("*")) == before
    assert service.steps == {}


def test_a_run_that_is_being_sent_is_refused(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.train.wandb_replay.PATIENCE_S", 0.5)
    folder = make_run(tmp_path / "run", LINES)
    with sending(folder, patience_s=0):
        assert main([str(folder)]) == 2
    assert "another process is sending it" in capsys.readouterr().err
    assert service.steps == {}


def test_a_run_whose_own_sender_comes_to_its_end_is_sent_then(service: Service, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", LINES)
    other = sending(folder, patience_s=0)
    other.__enter__()
    end = threading.Timer(1.0, other.__exit__, (None, None, None))
    end.start()
    assert main([str(folder)]) == 0
    end.join()
    assert service.steps != {}

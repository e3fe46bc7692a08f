"""The steps that train.profile_steps names leave a trace and a table on every rank, and no others do."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import megalite.train.loop as loop_module
from megalite.config.derive import derive
from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.optim.zero import ParameterGather
from megalite.pipeline.executor import Executor
from megalite.train.build import needs_of
from megalite.train.history import read_events
from tests.ranks import run_ranks
from tests.train.runs import train_on_rank
from tests.train.test_run import config_for, losses, start


def test_a_profiled_step_leaves_a_trace_and_a_table_and_learns_the_same(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "watched"
    assert start(config_for(text, folder, steps=6, profile_steps=[2, 5])) == 0
    names = [f"step-0000000{step}-rank-00000" for step in (2, 5)]
    found = sorted(path.name for path in (folder / "profile").iterdir())
    assert found == sorted(f"{name}.{end}" for name in names for end in ("trace.json.gz", "txt"))
    for name in names:
        assert "part: backward" in (folder / "profile" / f"{name}.txt").read_text()
        with gzip.open(folder / "profile" / f"{name}.trace.json.gz") as trace:
            labels = {event["name"] for event in json.load(trace)["traceEvents"]}
        assert {"train step", "part: forward", "part: backward", "part: optimizer", "aten::mm"} <= labels
    events = [event for event in read_events(folder / "events.jsonl") if event["kind"] == "profile"]
    assert [(it["step"], it["folder"]) for it in events] == [(step, f"{folder}/profile") for step in (2, 5)]
    assert start(config_for(text, tmp_path / "plain", steps=6)) == 0
    assert losses(folder) == losses(tmp_path / "plain")


def test_the_executor_knows_which_steps_are_profiled(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, forward_backward = list[bool](), Executor.forward_backward

    def watched(self: Executor, *arguments: Any) -> Any:
        known.append(self.profiled)
        return forward_backward(self, *arguments)

    monkeypatch.setattr(Executor, "forward_backward", watched)
    assert start(config_for(text, tmp_path / "run", steps=4, profile_steps=[2, 3])) == 0
    assert known == [False, True, True, False]


def test_a_trace_that_cannot_be_kept_does_not_end_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_space(self: Any, path: str) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(loop_module.profile, "export_chrome_trace", no_space)
    assert start(config_for(text, tmp_path / "run", steps=3, profile_steps=[2])) == 0
    assert "warning: the profile of step 2 could not be kept" in capsys.readouterr().out
    assert max(losses(tmp_path / "run")) == 3


def test_every_rank_leaves_a_trace_and_nothing_that_a_step_has_sent_ends_after_it(text: Path, tmp_path: Path) -> None:
    """torch writes the end of a transfer into the record of its beginning, though that may be freed by then."""
    config = derive(config_for(text, tmp_path / "run", steps=3, profile_steps=[2]), 2)
    pending: list[int] = run_ranks(_pending_after_profile, 2, config, needs=needs_of(config), timeout=60)
    assert pending == [0, 0]
    assert len([*(tmp_path / "run" / "profile").glob("*.trace.json.gz")]) == 2


def _pending_after_profile(context: ParallelContext, config: Config) -> int:
    """Transfers of parameters that are under way when the record ends."""
    gathers: list[ParameterGather] = []
    found: list[int] = []
    start, stop = ParameterGather.start, loop_module.profile.__exit__

    def watched_start(self: ParameterGather) -> None:
        gathers.append(self)
        start(self)

    def watched_stop(self: Any, *error: Any) -> None:
        found.append(len(gathers[-1]._pending))
        stop(self, *error)

    ParameterGather.start, loop_module.profile.__exit__ = watched_start, watched_stop  # type: ignore[method-assign]
    assert train_on_rank(context, config) == 0
    return found[0]

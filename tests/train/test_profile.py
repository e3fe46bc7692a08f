"""The steps that train.profile_steps names leave a trace and a time split on every rank, and no others do."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megalite.train.profile as profile_module
from megalite.config.derive import derive
from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.optim.zero import ParameterGather
from megalite.train.build import needs_of
from megalite.train.history import read_events
from tests.ranks import run_ranks
from tests.train.runs import train_on_rank
from tests.train.test_run import config_for, losses, start


def splits(run_dir: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """By step and rank."""
    found = [json.loads(path.read_text()) for path in sorted((run_dir / "profile").glob("*.json"))]
    return {(split["step"], split["rank"]): split for split in found}


def test_a_profiled_step_leaves_a_trace_and_its_time_split(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert start(config_for(text, folder, steps=6, profile_steps=[2, 5])) == 0
    found = splits(folder)
    assert set(found) == {(2, 0), (5, 0)}
    for (step, rank), split in found.items():
        parts = split["parts"]
        assert sum(parts.values()) == pytest.approx(split["wall_s"])
        assert min(parts["forward"], parts["backward"], parts["optimizer"]) > 0
        assert parts["backward"] + parts["forward"] > parts["communication"]
        with gzip.open(folder / "profile" / f"step-{step:08d}-rank-{rank:05d}.trace.json.gz") as trace:
            names = {event["name"] for event in json.load(trace)["traceEvents"]}
        assert {"train step", "part: forward", "part: backward", "part: optimizer", "aten::mm"} <= names
    events = [event for event in read_events(folder / "events.jsonl") if event["kind"] == "profile"]
    assert [event["step"] for event in events] == [2, 5]
    assert f"step 5: profiled into {folder / 'profile'}" in capsys.readouterr().out
    assert "backward" in (folder / "logs" / "rank-00000.log").read_text()
    assert [path.name for path in (folder / "profile").iterdir() if path.name.startswith(".")] == []


def test_profiling_changes_nothing_that_is_learned(text: Path, tmp_path: Path) -> None:
    assert start(config_for(text, tmp_path / "watched", steps=4, profile_steps=[1, 3])) == 0
    assert start(config_for(text, tmp_path / "plain", steps=4)) == 0
    assert losses(tmp_path / "watched") == losses(tmp_path / "plain")


@pytest.mark.parametrize("full", ["disk", "temporary folder", "limit"])
def test_a_trace_that_cannot_be_kept_does_not_end_the_run(
    text: Path, tmp_path: Path, full: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_space(path: Any, content: bytes = b"") -> None:
        raise OSError(28, "No space left on device", str(path))

    if full == "disk":
        monkeypatch.setattr("megalite.train.profile.write_atomically", no_space)
    elif full == "temporary folder":  # kineto writes what it can, and says nothing
        monkeypatch.setattr(
            profile_module.profile, "export_chrome_trace", lambda self, path: Path(path).write_text('{"traceEvents": [')
        )
    else:
        monkeypatch.setattr(profile_module, "LARGEST_TRACE", 1000)
    assert start(config_for(text, tmp_path / "run", steps=3, profile_steps=[2])) == 0
    assert "warning: the profile of step 2 could not be kept" in capsys.readouterr().out
    assert max(losses(tmp_path / "run")) == 3
    assert splits(tmp_path / "run") == {}


def _run(context: ParallelContext, config: Config) -> int:
    return train_on_rank(context, config)


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_every_rank_leaves_its_own_and_what_layers_wait_for_is_communication(
    text: Path, tmp_path: Path, axis: str
) -> None:
    settings = config_for(text, tmp_path / "run", steps=3, profile_steps=[2], eval_interval=0)
    settings.model = replace(settings.model, num_layers=2)
    layout = ParallelLayout(**{axis: 2})
    parallel = replace(settings.parallel, timeout_s=20, sequence_parallel=None, **{axis: 2})
    config = derive(replace(settings, parallel=parallel), 2)
    assert run_ranks(_run, 2, config, layout=layout, needs=needs_of(config), timeout=60) == [0, 0]
    found = splits(tmp_path / "run")
    assert set(found) == {(2, 0), (2, 1)}
    for split in found.values():
        assert split["parts"]["communication"] > 0
        assert (split["inside"]["forward"] > 0) == (split["inside"]["backward"] > 0) == (axis == "tp")


def test_nothing_that_a_profiled_step_has_sent_ends_after_its_record(text: Path, tmp_path: Path) -> None:
    """torch writes the end of a transfer into the record of its beginning, though that may be freed by then."""
    config = derive(config_for(text, tmp_path / "run", steps=3, profile_steps=[2]), 2)
    pending: list[int] = run_ranks(_pending_after_profile, 2, config, needs=needs_of(config), timeout=60)
    assert pending == [0, 0]


def _pending_after_profile(context: ParallelContext, config: Config) -> int:
    """Transfers of parameters that are under way when the record ends."""
    gathers: list[ParameterGather] = []
    found: list[int] = []
    start, stop = ParameterGather.start, profile_module.profile.__exit__

    def watched_start(self: ParameterGather) -> None:
        gathers.append(self)
        start(self)

    def watched_stop(self: Any, *error: Any) -> None:
        found.append(len(gathers[-1]._pending))
        stop(self, *error)

    ParameterGather.start, profile_module.profile.__exit__ = watched_start, watched_stop  # type: ignore[method-assign]
    assert train_on_rank(context, config) == 0
    return found[0]

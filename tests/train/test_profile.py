"""The steps that train.profile_steps names leave a trace and a table on every rank, and no others do."""

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megalite.train.loop as loop_module
import megalite.train.run as run_module
from megalite.config.derive import derive
from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.model.gpt import unseen
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
        assert "backward of block 0" in (folder / "profile" / f"{name}.txt").read_text()
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


def spans(folder: Path, rank: int) -> dict[str, list[tuple[float, float, int]]]:
    """Begin, end and thread of the ranges and operations of step 2, by name."""
    found = defaultdict[str, list[tuple[float, float, int]]](list)
    with gzip.open(folder / "profile" / f"step-00000002-rank-0000{rank}.trace.json.gz") as trace:
        for event in json.load(trace)["traceEvents"]:
            if event.get("ph") == "X":
                found[event["name"]].append((event["ts"], event["ts"] + event["dur"], event["tid"]))
    return {name: sorted(of) for name, of in found.items()}


def within(inner: list[tuple[float, float, int]], outer: list[tuple[float, float, int]]) -> int:
    """How many of the outer ranges hold an inner one."""
    return sum(any(begin <= b and e <= end and t == thread for b, e, t in inner) for begin, end, thread in outer)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_blocks_what_is_in_them_and_the_loss_have_names_in_both_directions(
    text: Path, tmp_path: Path, recompute: str
) -> None:
    config = config_for(text, tmp_path / "run", steps=3, profile_steps=[2], recompute=recompute)
    config.model = replace(config.model, num_layers=2)
    assert start(derive(config)) == 0
    found = spans(tmp_path / "run", 0)
    for name in ("embedding", "block 0", "block 1", "final norm", "loss", "backward of loss", "backward of final norm"):
        assert len(found[name]) == 2, name  # microbatches
    again = 2 if recompute == "full" else 1
    for name in ("attention_norm", "attention", "mlp_norm", "mlp"):
        assert len(found[name]) == 2 * 2 * again, name
        assert [within(found[name], found[f"block {layer}"]) for layer in range(2)] == [2, 2]
        backward = [within(found[name], found[f"backward of block {layer}"]) for layer in range(2)]
        assert backward == ([2, 2] if recompute == "full" else [0, 0])
    for name in ("block 0", "block 1", "backward of block 0", "backward of block 1", "loss"):
        assert within(found["aten::mm"], found[name]) == 2, name
    assert within(found["backward of block 0"], found["part: backward"]) == 2
    (_, end, _), (begin, _, _) = found["backward of block 1"][0], found["backward of block 0"][0]
    assert end <= begin


def test_names_end_with_the_profiled_step(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, build = list[Any](), run_module.build_training

    def and_note(*args: Any) -> Any:
        training = build(*args)
        chunks.extend(training.chunks)
        return training

    monkeypatch.setattr(run_module, "build_training", and_note)
    assert start(config_for(text, tmp_path / "run", steps=3, profile_steps=[2])) == 0
    [chunk] = chunks
    assert chunk.after_part is unseen
    assert chunk.before_use.__name__ == "wait_for"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in chunk.modules())


def test_blocks_of_each_stage_have_names_in_the_trace_of_their_rank(text: Path, tmp_path: Path) -> None:
    config = config_for(text, tmp_path / "run", steps=2, profile_steps=[2], eval_interval=0)
    config.model = replace(config.model, num_layers=2)
    config.parallel = replace(config.parallel, pp=2)
    config = derive(config, 2)
    assert run_ranks(train_on_rank, 2, config, layout=ParallelLayout(pp=2), timeout=60) == [0, 0]
    for rank in range(2):
        found = spans(tmp_path / "run", rank)
        names = {name for name in found if "block " in name}
        assert names == {f"block {rank}", f"backward of block {rank}"}
        assert within(found["aten::mm"], found[f"backward of block {rank}"]) == 2


@pytest.mark.long
def test_compiled_blocks_have_names(text: Path, tmp_path: Path, fresh_compiler: None) -> None:
    config = config_for(text, tmp_path / "run", steps=3, profile_steps=[2], compile=True, eval_interval=0)
    assert start(config) == 0
    found = spans(tmp_path / "run", 0)
    for name in ("block 0", "backward of block 0", "loss"):
        assert len(found[name]) == 2, name
    assert "attention" not in found

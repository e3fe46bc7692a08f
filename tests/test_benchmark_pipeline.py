"""The benchmark of the pipeline compares like with like, and what it predicts is what the simulator says."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from torch.multiprocessing.spawn import start_processes

from tests.ranks import start_forkserver

SMALL = ("model.num_layers=4", "model.hidden_size=32", "model.num_attention_heads=2", "model.vocab_size=300")


@pytest.fixture(scope="module")
def scripts() -> Iterator[None]:
    """Their folder is where Python looks for modules, in the processes that a test starts, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        start_forkserver()  # which has imported torch already
        warm = partial(start_processes, start_method="forkserver")
        patch.setattr(importlib.import_module("benchmark_pipeline"), "spawn", warm)
        yield


@pytest.fixture(scope="module")
def pipeline(scripts: None) -> ModuleType:
    return importlib.import_module("benchmark_pipeline")


def test_all_run_the_same_stages_to_the_same_losses_and_gradients(
    pipeline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = importlib.import_module("benchmark")
    small = pipeline.Shape(("model=tiny", *SMALL, "train.seq_length=16"))
    monkeypatch.setitem(pipeline.SHAPES, "tiny", small)
    file = tmp_path / "pipeline.json"
    arguments = ["--pipeline", "--model", "tiny", "--precision", "fp32", "--steps", "2", "--json", str(file)]
    assert benchmark.main(arguments) == 0, capsys.readouterr().out
    [report] = json.loads(file.read_text())
    ours = {f"megalite {schedule}" for schedule in pipeline.SCHEDULES}
    assert report["measured"].keys() == {*ours, pipeline.PEER}
    for name, ranks in report["measured"].items():
        assert ranks[0]["loss"] == 0 < ranks[1]["loss"]
        assert [len(rank["steps"]) for rank in ranks] == [2, 2]
        passes = {"megalite 1f1b": 16, "megalite zb-h1": 24, "megalite interleaved": 32}
        assert len(ranks[0]["steps"][0]["actions"]) == passes.get(name, 0)
    assert "losses and gradients agree" in capsys.readouterr().out


def comparison(pipeline: ModuleType) -> "pipeline.Comparison":  # type: ignore[name-defined]
    """Forward passes of 1 s, backward passes of 2 s, 27 s to the end of the step, 0.5 s of it lost."""
    table = pipeline.build_schedule(pipeline.ScheduleRequest("1f1b", 2, 8))
    ideal = pipeline.simulated(table, {(rank, 0, kind): time for rank in (0, 1) for kind, time in TIMES.items()})
    ours = []
    for rank, spans in enumerate(ideal.ranks):
        actions = [(str(action), start, end) for action, start, end in spans]
        ours.append(pipeline.Measured(3.0 * rank, [1.0, 2.0], [pipeline.Step(0.0, 27.5 - rank, actions)]))
    peer = [replace(one, steps=[pipeline.Step(0.0, 55.0, [])]) for one in ours]
    return pipeline.Comparison("small", "fp32", 1, {pipeline.OURS: ours, pipeline.PEER: peer})


TIMES = {"forward": 1.0, "backward": 2.0}


def test_a_step_is_compared_with_the_simulator_s_and_with_the_peer_s(pipeline: ModuleType) -> None:
    found = comparison(pipeline)
    assert found.faults == []
    assert found.predicted(pipeline.OURS)[0].makespan == 27
    assert found.by_prediction(pipeline.OURS) == 27.5 / 27
    assert found.by_peer(pipeline.OURS) == 0.5
    assert "27500.0" in pipeline.table(found)


@pytest.mark.parametrize("change", [{"loss": 3.1}, {"loss": float("nan")}, {"gradient": [1.0, 2.1]}])
def test_other_work_is_a_fault(pipeline: ModuleType, change: dict[str, float | list[float]]) -> None:
    found = comparison(pipeline)
    found.measured[pipeline.PEER][1] = replace(found.measured[pipeline.PEER][1], **change)
    [fault] = found.faults
    assert fault.startswith(f"{pipeline.PEER} does other work")

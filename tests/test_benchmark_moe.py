"""The benchmark of experts compares like with like, and its shares are those of what it measured."""

import importlib
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megalite.config.own_files import FIGURES, in_the_way
from tests.ranks import start_forkserver

SMALL = ("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.vocab_size=300")
EXPERTS = ("model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.ffn_hidden_size=16")


@pytest.fixture(scope="module")
def moe() -> Iterator[ModuleType]:
    """Its folder is where Python looks for modules, in the processes that a test starts, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        start_forkserver()  # which has imported torch already
        module = importlib.import_module("benchmark_moe")
        patch.setattr(module, "PROCESSES", multiprocessing.get_context("forkserver"))
        small = module.Shape(("model=tiny_moe", *SMALL, *EXPERTS, "train.seq_length=16"), 4, 4)
        patch.setitem(module.SHAPES, "tiny_moe", small)
        yield module


def test_a_layer_is_measured_with_and_without_what_is_around_its_experts(moe: ModuleType) -> None:
    config = moe.SHAPES["tiny_moe"].config(2, "fp32", torch.device("cpu"), *moe.FIXED)
    found = moe.measure_layer(config, rounds=2)
    assert [len(times) for times in (found.layer, found.experts, found.one_kernel)] == [2, 2, 2]
    assert found.around_experts < 1
    assert moe.LayerTimes([2.0, 4.0, 9.0], [1.0, 3.0, 9.0], [2.0, 6.0, 9.0]).around_experts == 0.25
    assert moe.LayerTimes([], [1.0, 3.0], [2.0, 6.0]).by_loop == 2


def test_other_work_is_a_fault_but_where_capacity_drops(moe: ModuleType) -> None:
    def turns(loss: float, seconds: float) -> list[list[object]]:
        return [[moe.Turn(loss, seconds, 0.1, 0.2, 0.0), moe.Turn(loss, seconds / 2, 0.0, 0.0, 0.0)]]

    whole = {name: turns(3.0, 1.0) for name in moe.CONTENDERS} | {moe.DROPS: turns(4.0, 1.0)}
    found = moe.Comparison("fp32", whole)
    assert found.faults == []
    assert found.wait(moe.REFERENCE, "for_rows") == pytest.approx(0.1)
    found = moe.Comparison("fp32", whole | {"tp 2": turns(float("nan"), 2.0)})
    assert [fault.split(" does ")[0] for fault in found.faults] == ["tp 2"]
    assert found.speed("tp 2") == 0.5


@pytest.mark.long
def test_all_layouts_train_the_same_model(moe: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = importlib.import_module("benchmark")
    file = tmp_path / "experts.json"
    arguments = ["--experts", "--precision", "fp32", "--steps", "2", "--json", str(file)]
    assert benchmark.main(arguments) == 0, capsys.readouterr().out
    assert in_the_way(file, FIGURES) == ""
    [report] = json.loads(file.read_text())
    assert report["turns"].keys() == moe.CONTENDERS.keys()
    assert all(turn["for_rows"] > 0 for ranks in report["turns"]["ep 2, alltoall"] for turn in ranks)
    assert "losses agree" in capsys.readouterr().out

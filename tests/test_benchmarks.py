"""Every benchmark starts, compares like with like, and its arithmetic is right."""

import importlib
import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from megalite.config.files import in_the_way
from megalite.hf.saved_model import import_model
from megalite.launch.context import ParallelContext
from megalite.model.flops import parameter_count
from tests.ranks import start_forkserver

CPU = torch.device("cpu")
LENGTH = "train.seq_length=16"
SMALL = ("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.vocab_size=384", LENGTH)
EXPERTS = ("model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.ffn_hidden_size=16")
TIMES = {"forward": 1.0, "backward": 2.0}


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The modules of benchmarks/ by their last word, with small shapes, and processes that have imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        start_forkserver()
        names = ("sides", "zero", "pipeline", "moe", "context", "optimizer")
        modules = {name: importlib.import_module(f"benchmark_{name}") for name in names}
        for name in ("zero", "pipeline"):
            patch.setattr(modules[name], "spawn", partial(start_processes, start_method="forkserver"))
        patch.setattr(modules["moe"], "PROCESSES", multiprocessing.get_context("forkserver"))
        patch.setitem(modules["sides"].SHAPES, "tiny", small(modules["sides"], "tiny"))
        patch.setitem(modules["zero"].SHAPES, "tiny", modules["zero"].Shape(("model=tiny", *SMALL), 2))
        deep = (*SMALL, "model.num_layers=4")
        patch.setitem(modules["pipeline"].SHAPES, "tiny", modules["pipeline"].Shape(("model=tiny", *deep)))
        of_experts = modules["moe"].Shape(("model=tiny_moe", *SMALL, *EXPERTS), 4, 4)
        patch.setitem(modules["moe"].SHAPES, "tiny_moe", of_experts)
        longer = modules["context"].Shape(("model=tiny", *SMALL, "train.seq_length=64"), 2, 2)
        patch.setitem(modules["context"].SHAPES, "tiny", longer)
        patch.setitem(modules["optimizer"].SHAPES, "tiny_moe", of_experts)
        yield SimpleNamespace(**modules, main=importlib.import_module("benchmark"))


def small(sides: ModuleType, model: str) -> Any:
    return sides.Shape((f"model={model}", *SMALL), 2, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param("--model tiny --device cpu", "tiny", marks=pytest.mark.long),
        ("--zero --model tiny", "x the time of the fastest peer"),
        ("--pipeline --model tiny", "losses and gradients agree"),
        pytest.param("--experts", "losses agree", marks=pytest.mark.long),
        pytest.param("--context", "losses agree", marks=pytest.mark.long),
        ("--optimizer --model tiny_moe", "ratio"),
    ],
)
def test_a_benchmark_starts_finds_no_fault_and_writes_its_figures(
    bench: Any, words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    arguments = [*words.split(), "--precision", "fp32", "--steps", "2", "--json", str(file)]
    assert bench.main.main(arguments) == 0, capsys.readouterr().out
    assert said in capsys.readouterr().out
    assert json.loads(file.read_text())
    assert in_the_way(file, bench.main.FIGURES) == "", "else a second run would refuse its own file"


@pytest.mark.parametrize("model", ["tiny", "gpt2"])
def test_both_sides_train_the_same_model_on_the_same_loss(bench: Any, model: str, tmp_path: Path) -> None:
    """Started from the peer's weights, in fp64, megalite reports the peer's loss, and so after a step of each."""
    config = small(bench.sides, model).config(2, "fp64", CPU, "train.compile=false")
    context = ParallelContext(dtype=torch.float64)
    tokens = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(1))
    ours, theirs, plain = (
        side(config, context, tokens) for side in (bench.sides.Megalite, bench.sides.Peer, bench.sides.PlainLoop)
    )
    theirs.model.save_pretrained(tmp_path)
    ours.training.buffers.fill(import_model(tmp_path, config.model))
    for bound in (1e-6, 1e-5):
        assert ours.step().read().loss == pytest.approx(theirs.step().item(), rel=bound)
    unused = 0 if model == "tiny" else (config.model.max_positions - 16) * 32
    assert sum(each.numel() for each in plain.model.parameters()) == parameter_count(config.model) - unused
    assert plain.step() > plain.step()


def test_overhead_counts_only_what_is_outside_the_steps_work(bench: Any) -> None:
    seconds, share = bench.main.measure_overhead(bench.sides.SHAPES["tiny"], precision="fp32", steps=6)
    assert seconds > 0
    assert 0 < share < 1
    assert bench.main.GPT.loss.__qualname__ == "GPT.loss"  # nothing stays wrapped


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("FSDP2", {"losses": [4.0, float("nan")]}, "FSDP2 does other work"),
        ("FSDP2", {"norm": 2.1}, "FSDP2 does other work"),
        ("megalite zero=1", {"sent": 999_999}, "999999 bytes from rank 1, 1000000 by the formula"),
        ("megalite zero=1", {"on_the_wire": 1_500_000}, "over TCP 1500000 bytes from rank 1"),
    ],
)
def test_other_work_and_other_bytes_of_zero_are_faults(
    bench: Any, name: str, change: dict[str, Any], fault: str
) -> None:
    ours = bench.zero.Measured([4.0, 3.0], 2.0, 1_001_000, 1_000_000, 1_000_000, [1.0], [1.0])
    peer = replace(ours, sent=None, formula=None)
    measured = {"megalite zero=1": [ours, ours], "FSDP2": [peer, peer]}
    assert bench.zero.Comparison("small", "fp32", 1, measured).faults == []
    measured[name][1] = replace(measured[name][1], **change)
    [found] = bench.zero.Comparison("small", "fp32", 1, measured).faults
    assert fault in found


def test_a_pipeline_is_compared_with_the_simulator_and_with_the_peer(bench: Any) -> None:
    """Forward passes of 1 s, backward passes of 2 s, 27 s to the end of the step, 0.5 s of it lost."""
    pipeline = bench.pipeline
    table = pipeline.build_schedule(pipeline.ScheduleRequest("1f1b", 2, 8))
    ideal = pipeline.simulated(table, {(rank, 0, kind): time for rank in (0, 1) for kind, time in TIMES.items()})
    ours = []
    for rank, spans in enumerate(ideal.ranks):
        actions = [(str(action), start, end) for action, start, end in spans]
        ours.append(pipeline.Measured(3.0 * rank, [1.0, 2.0], [pipeline.Step(0.0, 27.5 - rank, actions)]))
    peer = [replace(one, steps=[pipeline.Step(0.0, 55.0, [])]) for one in ours]
    found = pipeline.Comparison("small", "fp32", 1, {pipeline.OURS: ours, pipeline.PEER: peer})
    assert found.faults == []
    assert found.predicted(pipeline.OURS)[0].makespan == 27
    assert found.by_prediction(pipeline.OURS) == 27.5 / 27
    assert found.by_peer(pipeline.OURS) == 0.5
    for change in ({"loss": float("nan")}, {"gradient": [1.0, 2.1]}):
        found.measured[pipeline.PEER][1] = replace(ours[1], **change)
        [fault] = found.faults
        assert fault.startswith(f"{pipeline.PEER} does other work")


def test_other_work_of_experts_is_a_fault_but_where_capacity_drops(bench: Any) -> None:
    moe = bench.moe

    def turns(loss: float, seconds: float) -> list[list[object]]:
        return [[moe.Turn(loss, seconds, 0.1, 0.2, 0.0), moe.Turn(loss, seconds / 2, 0.0, 0.0, 0.0)]]

    whole = {name: turns(3.0, 1.0) for name in moe.CONTENDERS} | {moe.DROPS: turns(4.0, 1.0)}
    assert moe.Comparison("fp32", whole).faults == []
    found = moe.Comparison("fp32", whole | {"tp 2": turns(float("nan"), 2.0)})
    assert [fault.split(" does ")[0] for fault in found.faults] == ["tp 2"]
    assert found.speed("tp 2") == 0.5

"""The benchmark compares like with like and reports what it measured."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megalite.hf.import_model import import_model
from megalite.parallel.context import ParallelContext

CPU = torch.device("cpu")
SMALL = ("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.vocab_size=300")


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "benchmark.py"
    spec = importlib.util.spec_from_file_location("benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["tiny", "gpt2"])
def shape(request: pytest.FixtureRequest, benchmark: ModuleType) -> Any:
    """Either family, in miniature."""
    return benchmark.Shape((f"model={request.param}", *SMALL, "train.seq_length=16"), 2, 2)


def test_both_sides_train_the_same_model_on_the_same_loss(shape: Any, benchmark: ModuleType, tmp_path: Path) -> None:
    """Started from the peer's weights, in fp64, megalite reports the peer's loss, and so after a step of each."""
    config = shape.config(2, "fp64", CPU, "train.compile=false")
    context = ParallelContext(dtype=torch.float64)
    tokens = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(1))
    ours, theirs = benchmark.Megalite(config, context, tokens), benchmark.Peer(config, context, tokens)
    theirs.model.save_pretrained(tmp_path)
    ours.buffers.fill(import_model(tmp_path, config.model))
    first = ours.step().read().loss, theirs.step().item()
    assert first[0] == pytest.approx(first[1], rel=1e-6)
    second = ours.step().read().loss, theirs.step().item()
    assert second[0] == pytest.approx(second[1], rel=1e-5)
    assert second[0] < first[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_comparison_reports_rates_of_both_sides(shape: Any, benchmark: ModuleType, precision: str) -> None:
    config = shape.config(2, precision, CPU, "train.compile=false")
    context = ParallelContext(dtype=benchmark.DTYPES[precision])
    line = benchmark.compare("small", config, context, rounds=3, product_flops=1e12)
    assert line.tokens_per_step == 32
    assert 0 < line.megalite_tokens_per_s <= line.megalite_best_tokens_per_s
    assert 0 < line.peer_tokens_per_s <= line.peer_best_tokens_per_s
    assert line.megalite_of_products == pytest.approx(line.megalite_tflops)
    assert line.megalite_mfu is None  # a CPU's peak is not known
    assert "small" in benchmark.table([line])


def test_shapes_are_the_ones_they_are_named_for(benchmark: ModuleType) -> None:
    def parameters(name: str) -> int:
        return int(benchmark.parameter_count(benchmark.SHAPES[name].config(1, "fp32", CPU).model))

    assert parameters("gpt2") == 124_439_808
    assert parameters("1.3b") == pytest.approx(1.3e9, rel=0.02)


def test_figures_are_written_as_json(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = benchmark.Shape(("model=tiny", *SMALL, "train.seq_length=16"), 2, 2)
    monkeypatch.setitem(benchmark.SHAPES, "tiny", small)
    file = tmp_path / "speed.json"
    arguments = ["--model", "tiny", "--precision", "fp32", "--steps", "2", "--device", "cpu", "--json", str(file)]
    assert benchmark.main(arguments) == 0
    report = json.loads(file.read_text())
    assert report["figures"][0]["model"] == "tiny"
    assert report["figures"][0]["ratio"] > 0
    assert report["hardware"] in capsys.readouterr().out


def test_overhead_counts_only_what_is_outside_the_steps_work(benchmark: ModuleType) -> None:
    small = benchmark.Shape(("model=tiny", *SMALL, "train.seq_length=16"), 2, 2)
    seconds, share = benchmark.measure_overhead(small, precision="fp32", steps=6)
    assert seconds > 0
    assert 0 < share < 1
    assert benchmark.GPT.loss.__qualname__ == "GPT.loss"  # nothing stays wrapped


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--batch", "0"], ["--overhead", "--steps", "2"]])
def test_bad_numbers_are_refused(benchmark: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        benchmark.main(arguments)
    assert refused.value.code == 2

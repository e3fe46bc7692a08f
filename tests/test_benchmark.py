"""The benchmark compares like with like and reports what it measured."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from megalite.config.own_files import FIGURES, in_the_way
from megalite.hf.import_model import import_model
from megalite.launch.context import ParallelContext
from megalite.model.flops import parameter_count
from tests.ranks import run_ranks, start_forkserver

CPU = torch.device("cpu")
SMALL = ("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.vocab_size=300")


@pytest.fixture(scope="module")
def scripts() -> Iterator[None]:
    """Their folder is where Python looks for modules, in the processes that a test starts, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        start_forkserver()  # which has imported torch already
        warm = partial(start_processes, start_method="forkserver")
        patch.setattr(importlib.import_module("benchmark_zero"), "spawn", warm)
        yield


@pytest.fixture(scope="module")
def benchmark(scripts: None) -> ModuleType:
    return importlib.import_module("benchmark")


@pytest.fixture(scope="module")
def sides(scripts: None) -> ModuleType:
    return importlib.import_module("benchmark_sides")


@pytest.fixture(scope="module")
def zero(scripts: None) -> ModuleType:
    return importlib.import_module("benchmark_zero")


@pytest.fixture(params=["tiny", "gpt2"])
def shape(request: pytest.FixtureRequest, sides: ModuleType) -> Any:
    """Either family, in miniature."""
    return sides.Shape((f"model={request.param}", *SMALL, "train.seq_length=16"), 2, 2)


def test_both_sides_train_the_same_model_on_the_same_loss(shape: Any, sides: ModuleType, tmp_path: Path) -> None:
    """Started from the peer's weights, in fp64, megalite reports the peer's loss, and so after a step of each."""
    config = shape.config(2, "fp64", CPU, "train.compile=false")
    context = ParallelContext(dtype=torch.float64)
    tokens = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(1))
    ours, theirs = sides.Megalite(config, context, tokens), sides.Peer(config, context, tokens)
    theirs.model.save_pretrained(tmp_path)
    ours.training.buffers.fill(import_model(tmp_path, config.model))
    first = ours.step().read().loss, theirs.step().item()
    assert first[0] == pytest.approx(first[1], rel=1e-6)
    second = ours.step().read().loss, theirs.step().item()
    assert second[0] == pytest.approx(second[1], rel=1e-5)
    assert second[0] < first[0]


def test_the_plain_loop_trains_the_model_of_the_shape(shape: Any, sides: ModuleType) -> None:
    """On transformers' weights it has the peer's loss, and so after a step of each."""
    config = shape.config(2, "fp64", CPU, "train.compile=false")
    context = ParallelContext(dtype=torch.float64)
    tokens = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(1))
    peer, plain = sides.Peer(config, context, tokens), sides.PlainLoop(config, context, tokens)
    copy_weights(peer.model, plain.model)
    for _ in range(2):
        assert plain.step().item() == pytest.approx(peer.step().item(), rel=1e-6)  # its rotation is fp32


def copy_weights(peer: Any, plain: Any) -> None:
    """From transformers' GPT-2 or Llama."""
    transposed = hasattr(peer, "transformer")  # GPT-2's linear layers hold [inputs, outputs]
    body = peer.transformer if transposed else peer.model
    with torch.no_grad():
        plain.word.weight.copy_((body.wte if transposed else body.embed_tokens).weight)
        plain.head.weight.copy_(peer.lm_head.weight)
        plain.norm.load_state_dict((body.ln_f if transposed else body.norm).state_dict())
        if transposed:
            plain.position.weight.copy_(body.wpe.weight[: len(plain.position.weight)])
        for theirs, ours in zip(body.h if transposed else body.layers, plain.blocks, strict=True):
            if transposed:
                pairs = [(theirs.ln_1, ours.first_norm), (theirs.ln_2, ours.second_norm)]
                linears = [(theirs.attn.c_attn, ours.attention.qkv), (theirs.attn.c_proj, ours.attention.out)]
                linears += [(theirs.mlp.c_fc, ours.up), (theirs.mlp.c_proj, ours.down)]
                for its, mine in linears:
                    mine.weight.copy_(its.weight.t())
                    mine.bias.copy_(its.bias)
            else:
                pairs = [(theirs.input_layernorm, ours.first_norm), (theirs.post_attention_layernorm, ours.second_norm)]
                attention, mlp = theirs.self_attn, theirs.mlp
                qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
                ours.attention.qkv.weight.copy_(torch.cat([each.weight for each in qkv]))
                ours.attention.out.weight.copy_(attention.o_proj.weight)
                ours.up.weight.copy_(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
                ours.down.weight.copy_(mlp.down_proj.weight)
            for its, mine in pairs:
                mine.load_state_dict(its.state_dict())


@pytest.mark.long
def test_comparison_reports_rates_of_both_sides(benchmark: ModuleType, sides: ModuleType) -> None:
    config = sides.Shape(("model=tiny", *SMALL, "train.seq_length=16"), 2, 2).config(
        2, "bf16", CPU, "train.compile=false"
    )
    line = benchmark.compare("small", config, rounds=3, product_flops=1e12)
    assert line.tokens_per_step == 32
    assert 0 < line.megalite_tokens_per_s <= line.megalite_best_tokens_per_s
    assert 0 < line.peer_tokens_per_s <= line.peer_best_tokens_per_s
    assert line.megalite_of_products == pytest.approx(line.megalite_tflops)
    assert line.megalite_mfu is None  # a CPU's peak is not known
    assert "small" in benchmark.table([line])


@pytest.mark.long
def test_a_side_that_cannot_train_ends_the_comparison(sides: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    config = sides.Shape(("model=gpt2", *SMALL, "train.seq_length=16"), 2, 2).config(2, "fp32", CPU)
    config = replace(config, model=replace(config.model, num_attention_heads=5))  # of which 32 is no multiple
    with pytest.raises(RuntimeError, match=r"the side peer is gone \(exit status 1\)"):
        sides.Side("peer", config)
    assert "ValueError" in capfd.readouterr().err  # transformers' own words


@pytest.mark.long
def test_a_side_that_is_killed_between_turns_ends_the_comparison(sides: ModuleType) -> None:
    config = sides.Shape(("model=gpt2", *SMALL, "train.seq_length=16"), 2, 2).config(2, "fp32", CPU)
    with sides.Side("peer", config) as peer:
        assert peer.seconds(1) > 0
        peer._process.kill()
        peer._process.join()
        with pytest.raises(RuntimeError, match=r"the side peer is gone \(exit status -9\)"):
            peer.seconds(1)


def test_a_side_that_takes_too_long_is_ended(sides: ModuleType) -> None:
    config = sides.Shape(("model=gpt2", *SMALL, "train.seq_length=16"), 2, 2).config(2, "fp32", CPU)
    with pytest.raises(RuntimeError, match=r"the side peer takes more than 0\.01 s"):
        sides.Side("peer", config, 0.01)


def test_shapes_are_the_ones_they_are_named_for(sides: ModuleType) -> None:
    def parameters(name: str) -> int:
        return parameter_count(sides.SHAPES[name].config(1, "fp32", CPU).model)

    assert parameters("gpt2") == 124_439_808
    assert parameters("1.3b") == pytest.approx(1.3e9, rel=0.02)


@pytest.mark.long  # of --zero: below
def test_figures_are_written_as_json(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = benchmark.Shape(("model=tiny", *SMALL, "train.seq_length=16"), 2, 2)
    monkeypatch.setitem(benchmark.SHAPES, "tiny", small)
    file = tmp_path / "speed.json"
    arguments = ["--model", "tiny", "--precision", "fp32", "--steps", "2", "--device", "cpu", "--json", str(file)]
    assert benchmark.main(arguments) == 0
    assert in_the_way(file, FIGURES) == "", "else a second run would refuse its own file"
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


def test_all_who_shard_do_the_same_work_and_megalite_sends_what_the_formula_says(
    benchmark: ModuleType,
    zero: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = zero.Shape(("model=tiny", *SMALL, "model.vocab_size=384", "train.seq_length=16"), 2)  # no padded rows
    monkeypatch.setitem(zero.SHAPES, "tiny", small)
    file = tmp_path / "zero.json"
    arguments = ["--zero", "--model", "tiny", "--precision", "fp32", "--steps", "2", "--json", str(file)]
    assert benchmark.main(arguments) == 0, capsys.readouterr().out
    assert in_the_way(file, FIGURES) == ""
    [report] = json.loads(file.read_text())
    assert report["measured"].keys() == {"megalite zero=1", "megalite zero=0", "DDP + AdamW", *zero.PEERS}
    for name, ranks in report["measured"].items():
        assert [len(each["wall"]) for each in ranks] == [2, 2]
        assert ranks[0]["losses"][0] > ranks[0]["losses"][-1]
        if name.startswith("megalite"):  # 2 x parameters x 4 bytes x (n - 1) / n, and the padding of buckets
            assert 1 <= ranks[0]["formula"] / (report["parameters"] * 4) < 1.02
    assert "x the time of the fastest peer" in capsys.readouterr().out


@pytest.mark.long
def test_in_bf16_peers_keep_fp32_masters_and_gradients(zero: ModuleType) -> None:
    config = zero.Shape(("model=gpt2", *SMALL, "train.seq_length=16"), 2).config("bf16")
    ranks = run_ranks(zero.measure, 2, config, 1, dtype=torch.bfloat16)
    comparison = zero.Comparison("small", "bf16", 1, {name: [rank[name] for rank in ranks] for name in ranks[0]})
    assert comparison.faults == []
    assert comparison.measured.keys() == {"megalite zero=1", "megalite zero=0", "FSDP2"}
    sharded, whole = (comparison.measured[f"megalite zero={zero}"][0].formula for zero in (1, 0))
    assert sharded / whole == 0.75  # parameters travel in bf16, gradients in fp32


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("FSDP2", {"losses": [4.0, 3.1]}, "FSDP2 does other work"),
        ("FSDP2", {"losses": [4.0, float("nan")]}, "FSDP2 does other work"),
        ("FSDP2", {"norm": 2.1}, "FSDP2 does other work"),
        ("megalite zero=1", {"sent": 999_999}, "999999 bytes from rank 1, 1000000 by the formula"),
        ("megalite zero=1", {"on_the_wire": 999_999}, "over TCP 999999 bytes from rank 1"),
        ("megalite zero=1", {"on_the_wire": 1_500_000}, "over TCP 1500000 bytes from rank 1"),
    ],
)
def test_other_work_and_other_bytes_are_faults(zero: ModuleType, name: str, change: dict[str, Any], fault: str) -> None:
    ours = zero.Measured([4.0, 3.0], 2.0, 1_001_000, 1_000_000, 1_000_000, [1.0], [1.0])
    peer = replace(ours, sent=None, formula=None)
    measured = {"megalite zero=1": [ours, ours], "FSDP2": [peer, peer]}
    assert zero.Comparison("small", "fp32", 1, measured).faults == []
    measured[name][1] = replace(measured[name][1], **change)
    [found] = zero.Comparison("small", "fp32", 1, measured).faults
    assert fault in found


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "0"],
        ["--batch", "0"],
        ["--overhead", "--steps", "2"],
        ["--zero", "--model", "gpt2"],
        ["--model", "wide"],
    ],
)
def test_bad_options_are_refused(benchmark: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        benchmark.main(arguments)
    assert refused.value.code == 2


def test_figures_replace_figures_alone(benchmark: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("[]")
    with pytest.raises(SystemExit) as refused:
        benchmark.main(["--json", str(tmp_path / "notes.json")])
    assert refused.value.code == 2
    assert (tmp_path / "notes.json").read_text() == "[]"

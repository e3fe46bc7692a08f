"""A step that is not finite names what was first not finite, and on which ranks, whatever the layout; training goes on
as if nobody had looked."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import megalite.train.loop as loop_module
from megalite.config.derive import derive
from megalite.config.schema import Config, MoEConfig
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.model.block import Block
from megalite.pipeline.executor import Executor
from megalite.train.history import read_events
from megalite.train.origin import NOT_AGAIN
from megalite.train.step import TrainStep
from tests.ranks import run_ranks
from tests.train.runs import outcome
from tests.train.test_bad_steps import poison
from tests.train.test_run import config_for, losses, start

BAD_STEP = 3
FIRST = 4 * (BAD_STEP - 1)  # its first sample


def config_of(text: Path, run_dir: Path, **train: Any) -> Config:
    config = config_for(text, run_dir, **{"steps": 6, "eval_interval": 0, "micro_batch_size": 1, **train})
    config.model = replace(config.model, num_layers=2, num_key_value_heads=2)
    return derive(config)


def bad_event(run_dir: Path) -> dict[str, Any]:
    """The only one."""
    [event] = [it for it in read_events(run_dir / "events.jsonl") if it["kind"] == "skipped"]
    assert event["step"] == BAD_STEP
    return {name: event[name] for name in ("arose_in", "ranks", "samples", "gradients") if name in event}


def spoil_gradient(name: str, *, once: bool = False) -> None:
    """An element of this parameter's gradient on this rank is infinite in the bad step."""
    init, forward_backward, buffers = TrainStep.__init__, Executor.forward_backward, list[Any]()
    times = [1 if once else 99]

    def and_note(self: TrainStep, training: Any, *others: Any) -> None:
        init(self, training, *others)
        buffers[:] = [training.buffers]

    def and_spoil(self: Executor, batches: Any, scale: Tensor) -> Tensor:
        loss = forward_backward(self, batches, scale)
        if FIRST <= int(batches[0].samples[0]) < FIRST + 4 and times[0]:
            times[0] -= 1
            buffers[0].gradient(name).view(-1)[3] = math.inf
        return loss

    TrainStep.__init__, Executor.forward_backward = and_note, and_spoil  # type: ignore[method-assign,assignment]


def spoil_block(layer: int, sample: int, *, backward: bool) -> None:
    """The output of this block, or the gradient by it, is NaN where the microbatch begins with this sample."""
    forward_backward = Executor.forward_backward

    def and_spoil(self: Executor, batches: Any, scale: Tensor) -> Tensor:
        for chunk in self.chunks:
            if str(layer) in chunk.blocks:
                block = chunk.blocks[str(layer)]

                def forward(x: Tensor, inputs: Any, block: Any = block) -> Tensor:
                    x = Block.forward(block, x, inputs)
                    if int(batches[self.at.microbatch].samples[0]) != sample:  # type: ignore[union-attr]
                        return x
                    if backward:
                        x.register_hook(lambda gradient: gradient * math.nan)
                        return x
                    return x * math.nan

                block.forward = forward
        return forward_backward(self, batches, scale)

    Executor.forward_backward = and_spoil  # type: ignore[method-assign]


def on_rank(context: ParallelContext, config: Config, rank: int, function: Any, *arguments: Any) -> int | str:
    if context.rank == rank or rank < 0:
        {"gradient": spoil_gradient, "block": spoil_block}[function](*arguments[:-1], **arguments[-1])
    return outcome(context, config)


DP, TP, PP = ParallelLayout(dp=2), ParallelLayout(tp=2), ParallelLayout(pp=2)
DOWN, QKV = "blocks.1.mlp.down.weight", "blocks.0.attention.qkv.weight"
CASES: dict[str, tuple[ParallelLayout, dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "dp": (DP, {}, (1, "gradient", QKV, {}), {"arose_in": f"gradient of {QKV}", "ranks": [1]}),
    "tp": (
        TP,
        {"tp": 2},
        (1, "gradient", DOWN, {}),
        {"arose_in": f"gradient of {DOWN}", "ranks": [1]},
    ),
    "pp": (PP, {"pp": 2}, (0, "gradient", QKV, {}), {"arose_in": f"gradient of {QKV}", "ranks": [0]}),
    "not again": (DP, {}, (1, "gradient", QKV, {"once": True}), {"arose_in": NOT_AGAIN}),
    "backward in pp": (
        PP,
        {"pp": 2, "schedule": "zb-h1"},
        (-1, "block", 0, FIRST + 2, {"backward": True}),
        {"arose_in": "gradient of blocks.0.mlp.down.weight", "ranks": [0]},
    ),
    "forward in pp": (
        PP,
        {"pp": 2},
        (-1, "block", 1, FIRST + 2, {"backward": False}),
        {"arose_in": "output of blocks.1", "ranks": [1], "samples": [FIRST + 2]},
    ),
    "forward in dp": (
        DP,
        {},
        (-1, "block", 0, FIRST + 3, {"backward": False}),
        {"arose_in": "output of blocks.0", "ranks": [1], "samples": [FIRST + 3]},
    ),
    "backward in dp": (
        DP,
        {},
        (-1, "block", 0, FIRST + 3, {"backward": True}),
        {"arose_in": "gradient of blocks.0.mlp.down.weight", "ranks": [1]},
    ),
    "backward in tp": (
        TP,
        {"tp": 2},
        (-1, "block", 1, FIRST, {"backward": True}),
        {"arose_in": f"gradient of {DOWN}", "ranks": [0, 1]},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_first_not_finite_is_named_with_its_ranks(text: Path, tmp_path: Path, name: str) -> None:
    layout, parallel, spoil, expected = CASES[name]
    config = config_of(text, tmp_path / "run")
    overlap = "block" in spoil  # else gradients are changed before they are summed
    config.optimizer = replace(config.optimizer, overlap=overlap)
    config = derive(replace(config, parallel=replace(config.parallel, timeout_s=20, **parallel)))
    assert run_ranks(on_rank, 2, config, *spoil, layout=layout, timeout=60) == [0, 0]
    found = bad_event(tmp_path / "run")
    gradients = found.pop("gradients", None)
    assert found == expected
    if "gradient" in spoil and name != "not again":
        assert gradients == 1


def test_a_loss_and_a_weight_are_named_and_only_the_first_bad_step_in_a_row_is_computed_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = config_of(text, tmp_path / "weight")
    assert start(replace(of, optimizer=replace(of.optimizer, lr=1e308), train=replace(of.train, max_bad_steps=2))) == 1
    events = [it for it in read_events(tmp_path / "weight" / "events.jsonl") if it["kind"] == "skipped"]
    assert events[0]["arose_in"] == "weight embedding.word.weight"
    assert [len(event) for event in events] == [9, 6]
    poison({FIRST, FIRST + 4}, monkeypatch)
    assert start(config_of(text, tmp_path / "loss")) == 0
    events = [it for it in read_events(tmp_path / "loss" / "events.jsonl") if it["kind"] == "skipped"]
    assert [event.get("arose_in") for event in events] == ["loss", None]
    assert events[0]["ranks"] == [0]


@pytest.mark.parametrize("lateness", [0, 1])
def test_a_look_at_a_bad_step_changes_nothing(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lateness: int
) -> None:
    """Also where the step behind it has been launched before."""
    monkeypatch.setitem(loop_module.LATENESS, "cpu", lateness)
    poison({FIRST + 1}, monkeypatch)
    looks = list[int]()
    for name in ("watched", "plain"):
        config = config_of(text, tmp_path / name, recompute="full")
        config.model = replace(config.model, moe=MoEConfig(num_experts=4, score="sigmoid", expert_bias_rate=0.1))
        config = derive(config)
        right = loop_module.find_origin
        monkeypatch.setattr(loop_module, "find_origin", lambda *args: looks.append(1) or right(*args))  # noqa: B023
        if name == "plain":
            monkeypatch.setattr(loop_module, "find_origin", lambda *args: {})
        assert start(config) == 0
    assert looks == [1]
    assert losses(tmp_path / "watched").keys() == set(range(1, 7))
    lines = [losses(tmp_path / name) for name in ("watched", "plain")]
    assert [str(line) for line in lines] == [str(lines[0])] * 2
    assert bad_event(tmp_path / "plain") == {}


def test_what_memory_does_not_suffice_for_is_said(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison({FIRST}, monkeypatch)

    def no_memory(self: Executor) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Executor, "recording", no_memory)
    assert start(config_of(text, tmp_path / "run")) == 0
    assert bad_event(tmp_path / "run") == {"arose_in": "unknown: no memory to compute the step again"}


def short_of_memory(context: ParallelContext, config: Config) -> int | str:
    with pytest.MonkeyPatch.context() as patch:
        poison({FIRST}, patch)
        if context.rank == 1:
            patch.setattr(Executor, "recording", Mock(side_effect=torch.OutOfMemoryError))
        return outcome(context, config)


def test_memory_of_one_rank_alone_that_does_not_suffice_stops_nobody(text: Path, tmp_path: Path) -> None:
    config = config_of(text, tmp_path / "run")
    config = derive(replace(config, parallel=replace(config.parallel, timeout_s=20)))
    assert run_ranks(short_of_memory, 2, config, layout=DP, timeout=60) == [0, 0]
    assert bad_event(tmp_path / "run") == {"arose_in": "unknown: no memory to compute the step again"}

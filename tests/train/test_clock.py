"""The time of a step is divided without a rest, and the clock costs a step nothing that one could measure."""

import time
from typing import Any

import pytest
import torch

from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.model.gpt import GPT
from megalite.optim.adamw import FlatAdamW
from megalite.train import metrics as metrics_module
from megalite.train.build import build_training, fill_with_start_values, needs_of
from megalite.train.history import STEP_PARTS
from megalite.train.metrics import StepClock
from megalite.train.step import TrainStep
from tests.optim.small_model import masked_batches, small_config
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as its only element."""
    now = [100.0]
    monkeypatch.setattr(metrics_module, "perf_counter", lambda: now[0])
    return now


def test_each_part_gets_the_time_that_passes_in_it(seconds: list[float]) -> None:
    clock = StepClock(CPU)

    def spend(part: Any, length: float) -> None:
        clock.switch(part)
        seconds[0] += length

    seconds[0] += 1
    spend("data", 2)
    spend("forward", 4)
    with clock.within("communication"):
        seconds[0] += 8
    seconds[0] += 16  # forward again
    spend("backward", 32)
    spend("backward", 64)
    spend("optimizer", 128)
    split = clock.lap()()
    assert split == {
        "data": 2, "forward": 20, "backward": 96, "exchange": 0, "communication": 8, "optimizer": 128, "other": 1
    }  # fmt: skip
    seconds[0] += 3  # a step begins where the one before ended, as other
    spend("forward", 5)
    assert clock.lap()() == dict.fromkeys(STEP_PARTS, 0) | {"other": 3, "forward": 5}


def test_what_is_left_out_is_in_no_step(seconds: list[float]) -> None:
    clock = StepClock(CPU)
    seconds[0] += 1
    first = clock.lap()
    clock.switch("forward")
    seconds[0] += 1000  # an evaluation
    clock.restart()
    seconds[0] += 2
    assert sum(first().values()) == 1
    assert clock.lap()() == dict.fromkeys(STEP_PARTS, 0) | {"other": 2}


def laps(context: ParallelContext, **sections: Any) -> list[dict[str, float]]:
    """The time split of three steps, and under `wall` how long each took."""
    config = small_config(train={"micro_batch_size": 2}, **sections)
    training = build_training(config, context)
    fill_with_start_values(training.buffers, config, context)
    step = TrainStep(training, config.optimizer, context)
    found = []
    for _ in range(3):
        batches = masked_batches(config, 8, context.size("dp"))
        training.clock.restart()
        begin = time.perf_counter()
        launched = step(batches, 5, 1e-3, next_local_tokens=5)
        wall = time.perf_counter() - begin
        found.append({**launched.read().time_split, "wall": wall})
    training.gather.finish()
    return found


def test_the_parts_of_a_real_step_add_up_to_it() -> None:
    for split in laps(ParallelContext()):
        parts = {part: split[part] for part in STEP_PARTS}
        assert sum(parts.values()) == pytest.approx(split["wall"], rel=0.05, abs=2e-3)
        assert min(parts[part] for part in ("forward", "backward", "optimizer")) > 0
        assert parts["data"] == 0
        assert parts["communication"] < 0.5 * split["wall"]


def _slow_second_rank(context: ParallelContext, where: str, sections: dict[str, Any]) -> list[dict[str, float]]:
    owner, name = (GPT, "forward") if where == "forward" else (FlatAdamW, "step")
    quickly = getattr(owner, name)

    def slowly(*args: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return quickly(*args, **options)

    if context.rank == 1:
        setattr(owner, name, slowly)
    return laps(context, **sections)


@pytest.mark.parametrize(
    ("layout", "where"), [({"dp": 2}, "forward"), ({"dp": 2}, "optimizer"), ({"pp": 2}, "forward")]
)
def test_a_rank_that_waits_for_another_one_says_so(layout: dict[str, int], where: str) -> None:
    """The slow one computes for as long as the other waits: sums of gradients, parameters, transfers."""
    sections: dict[str, Any] = {"parallel": {"pp": 2, "schedule": "1f1b"}} if "pp" in layout else {}
    needs = needs_of(small_config(**sections))
    fast, slow = run_ranks(_slow_second_rank, 2, where, sections, layout=ParallelLayout(**layout), needs=needs)
    for waiting, computing in list(zip(fast, slow, strict=True))[1:]:  # parameters are waited for a step later
        assert waiting["communication"] > 0.03
        assert computing[where] > 0.05 > waiting[where]


@pytest.mark.gpu
def test_on_cuda_times_are_the_device_s() -> None:
    context = ParallelContext(device=torch.device("cuda", 0))
    clock = StepClock(context.device)
    matrix = torch.ones(4096, 4096, device=context.device)
    for _ in range(2):
        clock.switch("forward")
        for _ in range(20):
            matrix @ matrix
        clock.switch("optimizer")
        lap = clock.lap()
        torch.cuda.synchronize()
        split = lap()
        assert split["forward"] > 10 * split["optimizer"] > 0

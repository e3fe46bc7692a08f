"""A stop that comes during an evaluation or a sample of text ends it, on all ranks at the same batch or token."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.pipeline.executor import Executor
from megalite.train.history import read_events
from tests.train.runs import metrics, outcome
from tests.train.test_run import STEPS, config_for, losses, run_on


def _stopped(context: ParallelContext, config: Config, *, method: str, at: int) -> int | str:
    """The last rank is asked to stop in this start's call of the executor's `method` with the number `at`."""
    calls: list[None] = []
    compute = getattr(Executor, method)

    def and_stop(self: Executor, *args: Any) -> Any:
        calls.append(None)
        if len(calls) == at and context.rank == context.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, method, and_stop)
        found = outcome(context, config)
    return found if len(calls) == at else f"{len(calls)} calls"


@pytest.mark.parametrize(
    ("layout", "step", "at"),
    [
        pytest.param(None, 8, 7, id="alone, on the way"),
        pytest.param(None, STEPS, 12, id="alone, at the end"),
        pytest.param(ParallelLayout(tp=2), 8, 7, id="tp2, on the way"),
        pytest.param(ParallelLayout(tp=2, dp=2), 8, 7, id="tp2-dp2, on the way", marks=pytest.mark.long),
        pytest.param(ParallelLayout(tp=2, dp=2), STEPS, 12, id="tp2-dp2, at the end", marks=pytest.mark.long),
    ],
)
def test_a_stop_ends_an_evaluation_and_the_next_start_makes_up_for_it(
    text: Path, tmp_path: Path, layout: ParallelLayout | None, step: int, at: int
) -> None:
    def on_ranks(name: str, function: Any = outcome) -> list[int | str]:
        config = config_for(text, tmp_path / name, eval_batches=5)
        return run_on(layout, config, function) if layout else [function(ParallelContext(), config)]

    expected = [0] * (layout.world_size if layout else 1)
    assert on_ranks("whole") == expected
    for batch in (at, 2):  # the second start is stopped while it makes up for the evaluation
        assert on_ranks("parts", partial(_stopped, method="evaluate", at=batch)) == expected
        assert max(losses(tmp_path / "parts")) == step
        assert read_events(tmp_path / "parts" / "events.jsonl")[-1]["kind"] == "stopped"
    log = (tmp_path / "parts" / "logs" / "rank-00000.log").read_text()
    assert log.count(f"asked to stop: the evaluation after step {step} is broken off") == 2
    assert on_ranks("parts") == expected
    assert read_events(tmp_path / "parts" / "events.jsonl")[-1]["kind"] == "finished"
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


@pytest.mark.parametrize(
    ("layout", "interval"),
    [
        pytest.param(None, 4, id="alone, on the way"),
        pytest.param(None, 0, id="alone, at the end"),
        pytest.param(ParallelLayout(tp=2, dp=2), 4, id="tp2-dp2, on the way"),
        pytest.param(ParallelLayout(tp=2, dp=2), 0, id="tp2-dp2, at the end", marks=pytest.mark.long),
    ],
)
def test_a_stop_ends_a_sample_of_text(text: Path, tmp_path: Path, layout: ParallelLayout | None, interval: int) -> None:
    config = config_for(text, tmp_path / "run", sample_interval=interval, sample_tokens=1000)
    stopped = partial(_stopped, method="hidden", at=3)
    if layout:
        assert run_on(layout, config, stopped) == [0] * 4
    else:
        assert stopped(ParallelContext(), config) == 0
    assert max(losses(tmp_path / "run")) == (interval or STEPS)
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"kind": "sample"' not in events
    assert ('"kind": "stopped"' in events) == bool(interval)

"""The line of a step in metrics.jsonl, what it tells of shared sequences, and who computes much longer than others."""

import json
import re
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.derive import derive
from megalite.config.schema import Config
from megalite.config.step_plan import PlannedStep
from megalite.data.batches import StepBatches
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.train.history import STEP_PARTS, read_events, read_metrics
from megalite.train.metrics import SLOW, Meter, StepMetrics, stragglers
from tests.train.runs import outcome, train_on_rank, write_text
from tests.train.test_run import config_for, run_on

NAMES = "step tokens loss lr grad_norm tokens_per_s mean_tokens_per_s step_time_s training_s memory_gib"
NAMES += " data_wait_share time_split mfu mfu_causal bad_steps"


def test_a_line_of_metrics_is_a_record_with_its_names_in_order_and_nothing_that_is_not_of_the_run(
    text: Path, tmp_path: Path
) -> None:
    """With train.log_interval=100000 there may be many steps between two lines: a meter keeps none but the newest."""
    config = derive(config_for(text, tmp_path))
    config.model.vocab_size = 257
    meter, split, steps = Meter(config, ParallelContext(), {}), dict.fromkeys(STEP_PARTS, 0.5), []
    for step in range(1, 4):
        metrics = StepMetrics(2.0, 1.0, 64, False, False, False, 1e-3, time_split=dict(split))
        steps.append(weakref.ref(metrics))
        meter.add(metrics, StepBatches(PlannedStep(step, 0, 8, skipped=False), [], 0))
        del metrics
    assert [step() is None for step in steps] == [True, True, False]
    line = meter.line(tokens=192, bad_steps=0)
    assert line is not None
    assert " ".join(line) == NAMES
    assert (line["step"], line["time_split"], line["mfu"]) == (3, split, None)
    assert line["training_s"] == 3 * line["step_time_s"] == pytest.approx(1.5 * len(STEP_PARTS))
    assert meter.line(tokens=192, bad_steps=0) is None
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert read_metrics(tmp_path / "metrics.jsonl", pytest.fail) == [line]


def test_medians_are_of_steps_one_by_one_without_the_first(text: Path, tmp_path: Path) -> None:
    """The batch grows, so that the step with the median speed is not the one with the median time."""
    config = derive(config_for(text, tmp_path, seq_length=10))
    config.model.vocab_size = 257
    meter, steps = Meter(config, ParallelContext(), {}), [(90.0, 1), (1.0, 1), (2.0, 8), (4.0, 8)]
    assert meter.medians() == {}
    for step, (seconds, sequences) in enumerate(steps, 1):
        split = {**dict.fromkeys(STEP_PARTS, 0.0), "forward": seconds / 4, "backward": 3 * seconds / 4}
        metrics = StepMetrics(2.0, 1.0, 64, False, False, False, 1e-3, time_split=split)
        meter.add(metrics, StepBatches(PlannedStep(step, 0, sequences, skipped=False), [], 0))
        if step == 2:
            assert meter.line(tokens=1, bad_steps=0), "lines make no difference"
    assert meter.medians() == {"median_tokens_per_s": 20.0, "median_step_time_s": 2.0}  # of 10, 40, 20 and 1, 2, 4


@pytest.mark.parametrize(
    ("compute_s", "stages", "found"),
    [
        ([1.0, 1.1, 1.0, 1.25], None, []),
        ([1.0, 1.1, 1.4, 1.0], None, [2]),
        ([1.0, 2.0, 4.0, 1.0, 1.0], None, [1, 2]),
        ([1.0, 1.0, 3.0, 3.1], [0, 0, 1, 1], []),  # the stage with the loss has more to do
        ([1.0, 1.0, 3.0, 6.0], [0, 0, 1, 1], [3]),
        ([1.0, 9.0], [0, 1], []),
        ([0.0, 0.0, 0.0], None, []),  # nothing was measured
    ],
)
def test_who_takes_much_longer_than_half_of_its_stage_is_slow(
    compute_s: list[float], stages: list[int] | None, found: list[int]
) -> None:
    assert [*stragglers(compute_s, stages or [0] * len(compute_s))] == found


def _slow_third_rank(context: ParallelContext, config: Config) -> int | str:
    from megalite.model.gpt import GPT

    forward = GPT.forward

    def slowly(self: GPT, *args: Any) -> torch.Tensor:
        time.sleep(0.06)  # far more than three ranks on two cores wait for each other
        return forward(self, *args)

    if context.rank == 2:
        GPT.forward = slowly  # type: ignore[method-assign]
    return outcome(context, config)


def test_a_run_names_its_slow_rank(tmp_path: Path) -> None:
    config = config_for(write_text(tmp_path / "text.txt"), tmp_path / "run", global_batch_size=6)
    assert run_on(ParallelLayout(dp=3), config, _slow_third_rank) == [0, 0, 0]
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    (first, *_) = [event for event in events if event["kind"] == "straggler"]
    assert (first["rank"], first["step"]) == (2, 8)  # the first moment with steps enough to judge by
    assert first["times"] > SLOW
    assert 0.2 < first["share"] < 1, "it sleeps most of a step of a small model"
    log = (tmp_path / "run" / "logs" / "rank-00000.log").read_text()
    assert re.search(r"step 8: straggler: rank 2, times \S+, share \S+, host \S+", log)
    ranks = [event for event in events if event["kind"] == "ranks"]
    assert [event["step"] for event in ranks] == [4, 8, 12]
    assert all(len(event["memory_gib"]) == 3 and min(event["memory_gib"]) > 0.05 for event in ranks)
    assert all(event["compute_s"][2] > 0.02 for event in ranks)


def test_a_run_tells_its_exchange_its_cuts_and_how_long_it_waited_for_keys(tmp_path: Path) -> None:
    config = config_for(write_text(tmp_path / "text.txt"), tmp_path / "run", seq_length=64)
    config.parallel = replace(config.parallel, cp=2, cp_comm="ring")
    config.model = replace(config.model, attention_dropout=0.0)  # a ring has no whole rows of probabilities
    config.data = replace(config.data, cross_document_attention=False)
    assert run_on(ParallelLayout(cp=2), config, train_on_rank) == [0, 0]
    log = (tmp_path / "run" / "logs" / "rank-00000.log").read_text()
    assert "the ranks of a sequence exchange keys by ring" in log
    steps = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl", pytest.fail) if "loss" in line]
    microbatches = config.train.global_batch_size // (config.train.micro_batch_size or 1)
    assert steps
    for line in steps:
        assert sum(line["cuts"].values()) == microbatches
        assert {*line["cuts"]} <= {"zigzag", "stripes"}
        assert line["time_split"]["exchange"] > 0

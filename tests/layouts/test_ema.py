"""The average of the weights is that of one process on every layout, in fp64, and what a model with it computes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.optim.buffers import TrainingBuffers
from megalite.train.build import Training
from tests.layouts import matrix
from tests.layouts.matrix import FEW, FOUR, Row, Workplace, row, train_row
from tests.layouts.mutants import Mutant
from tests.layouts.test_muon import moe
from tests.layouts.test_resharding import BEFORE, rest_of_the_reference
from tests.layouts.training import STEPS, assert_same_training, train

EMA = {"optimizer": {"ema_half_life_steps": 2.0}}
MUON = {"optimizer": {"name": "muon", "ema_half_life_steps": 0.7}}
OFF = {"optimizer": {"zero": 0}}
INSTANCES = {"optimizer": {"instances": 2}}
# Weights are averaged as QK-clip leaves them, and as groups move them.
CLIPPED = {
    "optimizer": {"qk_clip": 0.05, "groups": [{"match": "blocks.0.attention.*", "lr": "3x", "weight_decay": 0.4}]}
}
ROWS = [
    row("llama", EMA, FEW, dp=2),
    row("qwen3", MUON, FEW, tp=2),
    row("gpt2", EMA, FOUR, FEW, pp=2),  # tied embeddings, which two ranks of a pipeline hold
    row("llama", EMA, OFF, dp=2),
    row("gpt2", EMA, INSTANCES, FEW, dp=4),
    row("llama", MUON, CLIPPED, FEW, tp=2),
]
LONG_ROWS = [
    row("gpt2", MUON, FOUR, pp=2, dp=2, schedule="zb-h1"),
    row("llama", EMA, {"optimizer": {"ownership": "whole"}}, tp=2, dp=2),
    row("llama", MUON, moe(), FEW, tp=2, etp=1, ep=2),
    row("llama", EMA, cp=2),
    row("qwen3", EMA, moe(), dp=4, ep=2),
]


@matrix.rows_of(ROWS, LONG_ROWS)
def test_ranks_average_like_one_process(workplace: Workplace, row: Row) -> None:
    reference = row.reference(workplace)
    assert reference.averaged is not None
    assert abs(reference.averaged.loss - reference.validation.loss) > 1e-3, "other weights would not be seen"
    matrix.assert_equal(workplace, row)


def started_at_zero(context: ParallelContext, config: Config) -> None:
    fill = TrainingBuffers.fill

    def and_forget(self: TrainingBuffers, values: Any) -> None:
        fill(self, values)
        for average in self.averages:
            average.zero_()

    TrainingBuffers.fill = and_forget  # type: ignore[method-assign]


def weight_in_fp32(context: ParallelContext, config: Config) -> None:
    average = TrainingBuffers.average

    def rounded(self: TrainingBuffers, weight: Tensor) -> None:
        average(self, weight.float())

    TrainingBuffers.average = rounded  # type: ignore[method-assign]


def averages_of_other_ranks_do_not_arrive(context: ParallelContext, config: Config) -> None:
    Training.cast_and_gather_params = lambda self: self.buffers.round_masters()  # type: ignore[method-assign]


BROKEN: list[tuple[Mutant, Row]] = [
    (started_at_zero, ROWS[0]),
    (weight_in_fp32, ROWS[0]),
    (averages_of_other_ranks_do_not_arrive, ROWS[0]),
]


@matrix.mutants_of(BROKEN)
def test_a_broken_average_is_caught(workplace: Workplace, mutant: Mutant, row: Row) -> None:
    matrix.assert_caught(workplace, mutant, row)


SAVED = [
    row("llama", EMA, FEW, dp=4),
    row("gpt2", EMA, FOUR, FEW, pp=2, dp=2),
]
CONTINUED = [
    row("llama", EMA, tp=2, dp=2),
    row("gpt2", EMA, FOUR, OFF, dp=3),
]
MORE = [
    (row("qwen3", MUON, FEW, tp=2, dp=2), row("qwen3", MUON, dp=4)),
    (row("llama", EMA, OFF, dp=2), row("llama", EMA, INSTANCES, dp=4)),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [*zip(SAVED, CONTINUED, strict=True), *(pytest.param(*pair, marks=pytest.mark.long) for pair in MORE)],
    ids=str,
)
def test_any_layout_continues_the_average_of_another(
    workplace: Workplace, tmp_path: Path, before: Row, after: Row
) -> None:
    train_row(workplace, before, partial(train, steps=BEFORE, saved=tmp_path / "saved"))
    found = train_row(workplace, after, partial(train, steps=STEPS - BEFORE, continued=tmp_path / "saved"))
    assert_same_training(found, rest_of_the_reference(workplace, before))

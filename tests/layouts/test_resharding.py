"""What one layout saved, every other continues as if nothing had happened, in fp64."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.model.gpt import Routers
from megalite.train.build import Training
from tests.layouts.matrix import FEW, FOUR, Row, Workplace, row, train_row
from tests.layouts.test_moe import moe
from tests.layouts.training import STEPS, Trace, assert_same_training, train

BEFORE = 3  # steps until the save
Saved = Callable[[Row], Path]
OFF = {"optimizer": {"zero": 0}}
INSTANCES = {"optimizer": {"instances": 2}}
WHOLE = {"optimizer": {"ownership": "whole", "bucket_size": 6000}}

SAVED = [
    row("llama", FOUR, FEW, dp=4),
    row("llama", FOUR, OFF, dp=4),
    row("llama", FOUR, FEW, tp=2, dp=2),
    row("gpt2", FOUR, FEW, pp=2, dp=2),  # tied embeddings, which two ranks of a pipeline hold
    row("gpt2", FOUR, pp=2, vpp=2),
    row("llama", FOUR, FEW, cp=2, cp_comm="alltoall"),
]
CONTINUED = [  # each with the saved family
    row("", FOUR),
    row("", FOUR, FEW, dp=2),
    row("", FOUR, WHOLE, dp=3),
    row("", FOUR, INSTANCES, dp=4),
    row("", FOUR, FEW, dp=4),
    row("", FOUR, OFF, dp=2),
    row("", FOUR, OFF, dp=3),
    row("", FOUR, OFF, dp=4),
    row("", FOUR, FEW, tp=2, dp=2),
    row("", FOUR, tp=4),
    row("", FOUR, pp=2, vpp=2),
    row("", FOUR, pp=4, schedule="zb-h1"),
    row("", FOUR, cp=2, tp=2, cp_comm="alltoall"),
]
MUON = {"optimizer": {"name": "muon"}}
SAVED_MUON = [row("llama", FOUR, MUON, FEW, dp=4), row("qwen3", FOUR, MUON, tp=4)]  # the last: one key-value head
CONTINUED_MUON = [
    row("", FOUR, MUON),
    row("", FOUR, MUON, FEW, tp=2, dp=2),
    row("", FOUR, MUON, OFF, dp=2),
    row("", FOUR, MUON, pp=2, tp=2),
]
SELDOM = (1, 4, 5, 6)  # fewer or as many replicas, of which others are tried


@pytest.fixture(scope="module")
def saved(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The checkpoint of a row after BEFORE steps."""

    @cache
    def saved_by(name: str) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        (before,) = (row for row in (*SAVED, *SAVED_MUON, *SAVED_EXPERTS) if str(row) == name)
        train_row(workplace, before, partial(train, steps=BEFORE, saved=folder))
        return folder

    return lambda row: saved_by(str(row))


def pairs() -> list[Any]:
    """Every layout that saves with every one that continues; in a plain run each that saves, and most that continue."""
    usual = {(number % len(SAVED), number) for number in range(len(CONTINUED)) if number not in SELDOM}
    return [
        pytest.param(before, after, marks=() if (saver, reader) in usual else pytest.mark.long)
        for saver, before in enumerate(SAVED)
        for reader, after in enumerate(CONTINUED)
    ]


@pytest.mark.parametrize(("before", "after"), pairs(), ids=str)
def test_any_layout_continues_any_other(workplace: Workplace, saved: Saved, before: Row, after: Row) -> None:
    rest = partial(train, steps=STEPS - BEFORE, continued=saved(before))
    found = train_row(workplace, replace(after, family=before.family), rest)
    assert_same_training(found, rest_of_the_reference(workplace, before))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(before, after, marks=() if number == 1 - saver else pytest.mark.long)
        for saver, before in enumerate(SAVED_MUON)
        for number, after in enumerate(CONTINUED_MUON)
    ],
    ids=str,
)
def test_momentum_goes_on_in_any_layout(workplace: Workplace, saved: Saved, before: Row, after: Row) -> None:
    test_any_layout_continues_any_other(workplace, saved, before, after)


@pytest.mark.parametrize("lost", ["others", "moments"])
def test_what_does_not_come_back_is_missed(workplace: Workplace, saved: Saved, lost: str) -> None:
    rest = partial(train_without, lost, steps=STEPS - BEFORE, continued=saved(SAVED[0]))
    found, expected = (
        train_row(workplace, row("llama", FOUR, FEW, dp=2), rest),
        rest_of_the_reference(workplace, SAVED[0]),
    )
    with pytest.raises(AssertionError):
        assert_same_training(found, expected)


SMALL = {"train": {"micro_batch_size": 3}}  # balancing losses know microbatches
MOE = moe(num_experts=8, score="sigmoid", expert_bias_rate=0.02, aux_loss="global", aux_loss_coeff=0.5)
SAVED_EXPERTS = [
    row("llama", MOE, SMALL, dp=4, ep=4),
    row("llama", MOE, SMALL, pp=2, dp=2, ep=2),
    row("llama", MOE, SMALL, pp=2, dp=4, ep=4),
    row("llama", MOE, SMALL, tp=2, dp=2, etp=2, ep=2),  # each expert in two parts
]
CONTINUED_EXPERTS = [
    row("llama", MOE, SMALL),
    row("llama", MOE, SMALL, dp=2, ep=2),
    row("llama", MOE, SMALL, tp=2),  # etp 2
    row("llama", MOE, SMALL, dp=2),
    row("llama", MOE, SMALL, OFF, dp=4, ep=2),
    row("llama", MOE, SMALL, tp=2, dp=2, etp=1, ep=4),
    row("llama", MOE, SMALL, tp=2, pp=2, etp=2),
    row("llama", MOE, SMALL, dp=4, etp=2, ep=2),
    row("llama", MOE, SMALL, tp=2, dp=4, etp=1, ep=8),
]


def expert_pairs() -> list[Any]:
    usual = {(0, 0), (0, 1), (0, 2), (1, 3), (3, 0)}
    return [
        pytest.param(before, after, marks=() if (saver, reader) in usual else pytest.mark.long, id=f"{saver}-{reader}")
        for saver, before in enumerate(SAVED_EXPERTS)
        for reader, after in enumerate(CONTINUED_EXPERTS)
    ]


@pytest.mark.parametrize(("before", "after"), expert_pairs())
def test_any_layout_of_experts_continues_any_other(workplace: Workplace, saved: Saved, before: Row, after: Row) -> None:
    rest = partial(train, steps=STEPS - BEFORE, continued=saved(before))
    expected = rest_of_the_reference(workplace, before)
    assert all(bool(value.any()) for value in expected.routers.values())
    assert_same_training(train_row(workplace, after, rest), expected)


@pytest.mark.parametrize("lost", ["expert_bias", "share"])
def test_what_routers_do_not_get_back_is_missed(workplace: Workplace, saved: Saved, lost: str) -> None:
    before = SAVED_EXPERTS[0]
    rest = partial(train_without, lost, steps=STEPS - BEFORE, continued=saved(before))
    found = train_row(workplace, CONTINUED_EXPERTS[0], rest)
    with pytest.raises(AssertionError):
        assert_same_training(found, rest_of_the_reference(workplace, before))


def rest_of_the_reference(workplace: Workplace, saved: Row) -> Trace:
    whole = saved.reference(workplace)
    steps = ("losses", "grad_norms", "tokens", "gradients", "routing", "sizes", "layers")
    return replace(whole, **{name: getattr(whole, name)[BEFORE:] for name in steps})


def train_without(lost: str, context: ParallelContext, config: Config, **options: Any) -> Trace:
    """Continues without the other ranks' parameters, or without the first moments, or without what routers keep."""

    def spread(self: Training) -> None:
        if lost != "others":
            cast_and_gather_params(self)
        if lost == "moments":
            for part in self.optimizer.exp_avg:
                part.zero_()
        for name, value in Routers(self.chunks).state():
            if name.endswith(lost):
                value.zero_()

    cast_and_gather_params = Training.cast_and_gather_params
    Training.cast_and_gather_params = spread  # type: ignore[method-assign]
    return train(context, config, **options)

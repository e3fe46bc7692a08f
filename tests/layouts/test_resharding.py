"""What one cut of the optimizer's state saved, every other continues as if nothing had happened, in fp64."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.derive import derive
from megalite.config.schema import Config, ParallelConfig
from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.train.build import Training, needs_of
from tests.layouts.reference import reference
from tests.layouts.test_tensor_parallel import Overrides, merged
from tests.layouts.training import STEPS, Trace, assert_same_training, small_config, train
from tests.ranks import run_ranks

BEFORE = 3  # steps until the save
BATCH = {"train": {"micro_batch_size": 1}, "model": {"num_layers": 4}}
ZERO = {"optimizer": {"zero": 1, "bucket_size": 6000}}
OFF = {"optimizer": {"zero": 0}}
INSTANCES = {"optimizer": {"instances": 2}}
WHOLE = {"optimizer": {"ownership": "whole", "bucket_size": 6000}}
Cut = tuple[dict[str, int], Overrides]  # sizes of the layout; settings of the optimizer and the pipeline

SAVED: list[Cut] = [
    ({"dp": 4}, ZERO),
    ({"dp": 4}, OFF),
    ({"tp": 2, "dp": 2}, ZERO),
    ({"pp": 2, "dp": 2}, ZERO),
    ({"pp": 2, "vpp": 2}, {}),
]
CONTINUED: list[Cut] = [
    ({}, {}),
    ({"dp": 2}, ZERO),
    ({"dp": 3}, WHOLE),
    ({"dp": 4}, INSTANCES),
    ({"dp": 4}, ZERO),
    ({"dp": 2}, OFF),
    ({"dp": 3}, OFF),
    ({"dp": 4}, OFF),
    ({"tp": 2, "dp": 2}, ZERO),
    ({"tp": 4}, {}),
    ({"pp": 2, "vpp": 2}, {}),
    ({"pp": 4}, {"parallel": {"schedule": "zb-h1"}}),
]


def family_of(cut: Cut) -> str:
    """What a layout saves: pipelines a model with tied embeddings, which two of their ranks hold."""
    return "gpt2" if "pp" in cut[0] else "llama"


def config_of(workplace: tuple[Path, Path], family: str, cut: Cut) -> Config:
    sizes, changes = cut
    config = small_config(*workplace, family, **merged(BATCH, {"optimizer": changes.get("optimizer", {})}))
    axes = {axis: size for axis, size in sizes.items() if axis != "dp"}
    config.parallel = ParallelConfig(**axes, **changes.get("parallel", {}))
    return derive(config, ParallelLayout(**sizes).world_size)


def run(
    config: Config,
    cut: Cut,
    steps: int,
    *,
    continued: Path | None = None,
    saved: Path | None = None,
    function: Callable[..., Trace] = train,
) -> list[Trace]:
    layout = ParallelLayout(**cut[0])
    work = partial(function, steps=steps, continued=continued, saved=saved)
    return run_ranks(work, layout.world_size, config, dtype=torch.float64, layout=layout, needs=needs_of(config))


@pytest.fixture(scope="module")
def saved(workplace: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each cut in SAVED, after BEFORE steps."""
    folders = {}
    for cut in SAVED:
        folder = tmp_path_factory.mktemp("saved")
        reference(workplace, family_of(cut), BATCH)  # prepares the text
        run(config_of(workplace, family_of(cut), cut), cut, BEFORE, saved=folder)
        folders[str(cut)] = folder
    return folders


def pairs() -> list[Any]:
    """Every cut that saves with every one that continues; each of either kind at least once outside the long matrix."""
    usual = {(number % len(SAVED), number) for number in range(len(CONTINUED))}
    return [
        pytest.param(before, after, marks=() if (saver, reader) in usual else pytest.mark.long)
        for saver, before in enumerate(SAVED)
        for reader, after in enumerate(CONTINUED)
    ]


@pytest.mark.parametrize(("before", "after"), pairs(), ids=str)
def test_any_cut_continues_any_other(
    workplace: tuple[Path, Path], saved: dict[str, Path], before: Cut, after: Cut
) -> None:
    family = family_of(before)
    found = run(config_of(workplace, family, after), after, STEPS - BEFORE, continued=saved[str(before)])
    assert_same_training(found, rest_of_the_reference(workplace, family))


@pytest.mark.parametrize("lost", ["others", "moments"])
def test_what_does_not_come_back_is_missed(workplace: tuple[Path, Path], saved: dict[str, Path], lost: str) -> None:
    cut: Cut = ({"dp": 2}, ZERO)
    function = partial(train_without, lost)
    config = config_of(workplace, "llama", cut)
    found = run(config, cut, STEPS - BEFORE, continued=saved[str(SAVED[0])], function=function)
    with pytest.raises(AssertionError):
        assert_same_training(found, rest_of_the_reference(workplace, "llama"))


def rest_of_the_reference(workplace: tuple[Path, Path], family: str) -> Trace:
    _, whole = reference(workplace, family, BATCH)
    return replace(
        whole,
        losses=whole.losses[BEFORE:],
        grad_norms=whole.grad_norms[BEFORE:],
        tokens=whole.tokens[BEFORE:],
        gradients=whole.gradients[BEFORE:],
    )


def train_without(lost: str, context: ParallelContext, config: Config, **options: Any) -> Trace:
    """Continues without the other ranks' parameters, or without the first moments."""

    def spread(self: Training) -> None:
        if lost == "moments":
            spread_masters(self)
            for part in self.optimizer.exp_avg:
                part.zero_()

    spread_masters = Training.spread_masters
    Training.spread_masters = spread  # type: ignore[method-assign]
    return train(context, config, **options)

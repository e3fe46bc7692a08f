"""The steps of a run from tokens per parameter, FLOPs and epochs, counted by hand."""

from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config.derive import derive, derive_vocabulary
from megalite.config.schema import Config
from megalite.config.settings import with_values
from megalite.data.open import OpenedData, TokenFiles, open_data
from megalite.errors.problems import UserError
from megalite.plan.horizon import length_words, with_steps
from megalite.train.saving import Progress
from tests.data.conftest import write_token_file

WIDTH, LAYERS, INNER, VOCABULARY, LENGTH, BATCH = 16, 2, 24, 50, 8, 4
BLOCK = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER  # matrices of attention and a gated MLP
PARAMETERS = VOCABULARY * WIDTH + LAYERS * (BLOCK + 2 * WIDTH) + WIDTH  # the embedding, which is the head, and norms
FLOPS = 6 * (LAYERS * BLOCK + VOCABULARY * WIDTH) + 12 * LAYERS * WIDTH * LENGTH  # of a token
SAMPLES = (1001 - 1) // LENGTH  # of a file with 1001 tokens
SHAPE = {
    "model.hidden_size": WIDTH,
    "model.num_layers": LAYERS,
    "model.num_attention_heads": 2,
    "model.ffn_hidden_size": INNER,
    "train.global_batch_size": BATCH,
    "train.seq_length": LENGTH,
    "data.source": "tokens",
    "data.path": "tokens",
    "data.validation_fraction": 0.0,
}


@pytest.fixture
def data(tmp_path: Path) -> OpenedData:
    return opened(tmp_path, 1001)


def opened(folder: Path, *tokens: int, weights: list[float] | None = None) -> OpenedData:
    """Token files of these lengths, and their weights in a blend."""
    prefixes = [folder / f"part-{at}" for at in range(len(tokens))]
    for prefix, number in zip(prefixes, tokens, strict=True):
        write_token_file(prefix, [[1] * number], np.dtype(np.uint16), {"vocab_size": VOCABULARY})
    paths = [str(prefix) for prefix in prefixes]
    return open_data(config_for(**{"data.path": paths, "data.weights": weights}), TokenFiles(prefixes, None, {}))


def config_for(**values: Any) -> Config:
    return derive_vocabulary(derive(with_values(Config(), SHAPE | values)), VOCABULARY)


def steps(data: OpenedData, progress: Progress | None = None, **values: Any) -> int:
    return with_steps(config_for(**values), data, progress or Progress()).train.steps


def least(samples: float, sizes: list[int]) -> int:
    """The least number of steps of these sizes, the last one repeated, that take the samples: a plain loop."""
    taken = number = 0
    while taken < samples:
        taken, number = taken + sizes[min(number, len(sizes) - 1)], number + 1
    return number


RAMP = {"train.global_batch_size": 8, "train.batch_ramp": [2, 2, 12]}  # larger from samples 4, 8 and 12 on
RAMP_SIZES = [2, 2, 4, 6, 8]


@pytest.mark.parametrize(("changes", "sizes"), [({}, [BATCH]), (RAMP, RAMP_SIZES)], ids=["even", "ramp"])
def test_every_horizon_is_so_many_steps(data: OpenedData, changes: dict[str, Any], sizes: list[int]) -> None:
    per_parameter, flops, epochs = "train.tokens_per_parameter", "train.flops", "train.epochs"
    for amount in (0.001, 0.37, 1.0, 3.25):
        assert steps(data, **changes, **{per_parameter: amount}) == least(amount * PARAMETERS / LENGTH, sizes)
        assert steps(data, **changes, **{flops: amount * 1e7}) == least(amount * 1e7 / FLOPS / LENGTH, sizes)
        assert steps(data, **changes, **{epochs: amount}) == least(amount * SAMPLES, sizes)
    assert steps(data, **changes, **{"train.tokens": 333}) == least(ceil(333 / LENGTH), sizes)
    assert steps(data, **changes, **{"train.steps": 17}) == 17


def test_decimal_shares_are_exact(tmp_path: Path) -> None:
    data = opened(tmp_path, 10 * LENGTH * BATCH + 1)  # 40 samples
    assert steps(data, **{"train.epochs": 0.1}) == 1, "4 samples of 40, not one more by rounding"
    assert steps(data, **{"train.epochs": 0.7}) == 7


def test_experts_count_where_a_token_meets_them(data: OpenedData) -> None:
    moe = {"model.moe.num_experts": 4, "model.moe.top_k": 1, "model.moe.ffn_hidden_size": INNER}
    router = LAYERS * 4 * WIDTH
    assert steps(data, **moe, **{"train.tokens_per_parameter": 2}) == least(2 * (PARAMETERS + router) / LENGTH, [BATCH])
    untied = {"model.tie_embeddings": False, "train.tokens_per_parameter": 2}
    assert steps(data, **untied) == least(2 * (PARAMETERS + VOCABULARY * WIDTH) / LENGTH, [BATCH])


def test_an_epoch_of_a_blend_is_as_many_samples_as_its_parts_have(tmp_path: Path) -> None:
    data = opened(tmp_path, 401, 1601, weights=[1.0, 1.0])
    config = with_steps(config_for(**{"train.epochs": 2.0}), data, Progress())
    assert config.train.steps == least(2 * (50 + 200), [BATCH])
    assert length_words(config, data, 4 * config.train.steps).endswith("2 epochs, 5 of the part that is repeated most")


def test_what_follows_from_steps_is_derived_unless_it_is_given(data: OpenedData) -> None:
    config = with_steps(config_for(**{"train.epochs": 8.0}), data, Progress())
    assert (config.train.steps, config.lr.warmup_steps, config.lr.decay_steps) == (250, 25, 50)
    config = with_steps(config_for(**{"train.epochs": 8.0, "lr.warmup_steps": 3}), data, Progress())
    assert (config.lr.warmup_steps, config.lr.decay_steps) == (3, 50)


def test_a_run_goes_on_for_what_its_horizon_still_takes(data: OpenedData) -> None:
    epoch = {"train.epochs": 1.0}
    whole = steps(data, **epoch)
    for done in range(whole + 1):
        assert steps(data, Progress(step=done, samples=BATCH * done), **epoch) == whole
    halfway = Progress(step=10, samples=40)  # with batches of 4; those that follow are twice as large
    assert steps(data, halfway, **epoch, **{"train.global_batch_size": 8}) == 10 + least(SAMPLES - 40, [8])
    assert steps(data, Progress(step=99, samples=SAMPLES), **epoch) == 99, "nothing is left"


def test_the_words_tell_all(data: OpenedData) -> None:
    config = with_steps(config_for(**{"train.epochs": 0.5}), data, Progress())
    tokens = 16 * BATCH * LENGTH
    words = length_words(config, data, 16 * BATCH)
    flops = f"{tokens * FLOPS:.2e}".replace("e+0", "e")
    per_parameter, epochs = f"{tokens / PARAMETERS:.3g}", f"{16 * BATCH / SAMPLES:.3g}"
    assert words == f"16 steps: {tokens} tokens, {per_parameter} tokens per parameter, {flops} FLOPs, {epochs} epochs"


@pytest.mark.parametrize(
    ("values", "refused", "rule"),
    [
        ({"train.flops": 1e30}, "train.flops", "more than 99,999,999"),
        ({"train.epochs": 0.1, "lr.warmup_steps": 9}, "lr.warmup_steps", "above 4, the steps of train.epochs=0.1"),
        ({"train.epochs": 0.1, "train.skip_steps": [5]}, "train.skip_steps", "from 1 to 4, the steps of"),
    ],
    ids=["long", "warm-up", "skipped"],
)
def test_a_length_that_does_not_suit_is_refused(
    data: OpenedData, values: dict[str, Any], refused: str, rule: str
) -> None:
    with pytest.raises(UserError) as caught:
        steps(data, **values)
    [problem] = caught.value.problems
    assert problem.setting == refused
    assert rule in problem.rule

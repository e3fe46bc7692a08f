"""Start values depend on seed, name and position in the logical tensor, and on nothing else."""

import pytest
import torch

from megalite.model.init import draw, fill, start_values
from megalite.model.parameters import gpt_parameters
from megalite.parallel.parameters import ParameterRecord
from tests.model.small import perturbed, small

WEIGHT = ParameterRecord("blocks.0.mlp.gate_up.weight", (2, 290, 300), "normal", 0.5, True)


@pytest.mark.parametrize("rows", [slice(0, 100), slice(100, 290), slice(200, 400), slice(512, 580), slice(255, 257)])
def test_a_shard_is_a_slice_of_the_whole_bit_for_bit(rows: slice) -> None:
    whole = draw(WEIGHT, seed=3)
    assert whole.shape == WEIGHT.shape
    assert torch.equal(draw(WEIGHT, 3, rows), whole.view(580, 300)[rows])


def test_the_number_of_threads_changes_nothing() -> None:
    one, four = (dict(start_values([WEIGHT], 3, threads=threads)) for threads in (1, 4))
    assert torch.equal(one[WEIGHT.name], four[WEIGHT.name])


def test_values_are_normal_with_the_records_deviation() -> None:
    record = ParameterRecord("w", (700, 900), "normal", 0.02, True)
    values = draw(record, 1).double()
    count = values.numel()
    assert abs(values.mean()) < 4 * 0.02 / count**0.5
    assert abs(values.std() / 0.02 - 1) < 4 / (2 * count) ** 0.5
    assert abs((values.abs() < 0.02).double().mean() - 0.6827) < 4 * (0.6827 * 0.3173 / count) ** 0.5
    # Neighbours, also across the edges of tiles, are independent.
    for left, right in (
        (values[:, 1:], values[:, :-1]),
        (values[256:], values[:-256]),
        (values[:, 256:], values[:, :-256]),
    ):
        assert abs((left * right).mean() / 0.02**2) < 4 / right.numel() ** 0.5


def test_seed_name_and_tile_each_change_the_values() -> None:
    record = ParameterRecord("w", (512, 512), "normal", 1.0, True)
    values = draw(record, 1)
    tiles = [values[:256, :256], values[:256, 256:], values[256:, :256], values[256:, 256:]]
    tiles += [draw(record, 2)[:256, :256], draw(ParameterRecord("v", (512, 512), "normal", 1.0, True), 1)[:256, :256]]
    for index, tile in enumerate(tiles):
        assert not any(torch.equal(tile, other) for other in tiles[:index])


def test_known_values_are_drawn_again() -> None:
    # A change here changes every run's start: it must be made on purpose.
    known = [-0.3209521770477295, 0.08751500397920609, -0.7972986102104187, -0.5418781042098999]
    assert torch.equal(draw(ParameterRecord("w", (4,), "normal", 1.0, True), 1234), torch.tensor(known))


def test_norms_start_at_one_and_biases_at_zero() -> None:
    values = dict(start_values(gpt_parameters(small(norm="layernorm", bias=True)), 1))
    assert torch.equal(values["final_norm.weight"], torch.ones(24))
    assert torch.equal(values["blocks.1.attention.qkv.bias"], torch.zeros(2, 4, 10))


def test_a_bf16_model_holds_the_rounded_draw() -> None:
    config = small()
    model = perturbed(config, dtype=torch.bfloat16)
    fill(model, start_values(gpt_parameters(config), 5))
    values = dict(start_values(gpt_parameters(config), 5))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name].bfloat16()), name

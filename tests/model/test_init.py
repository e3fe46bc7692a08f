"""Start values depend on seed, name and position in the logical tensor, and on nothing else."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from megalite.layout.parameters import ParameterRecord, ShardBox, shard
from megalite.model import init
from megalite.model.init import fill, start_values
from megalite.model.parameters import gpt_parameters
from tests.layout.shards import cut
from tests.model.small import perturbed, small

WEIGHT = ParameterRecord("blocks.0.mlp.gate_up.weight", (2, 290, 300), "normal", 0.5, True)


def draw(
    record: ParameterRecord, seed: int, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()
) -> torch.Tensor:
    box = ShardBox(offsets or (0,) * len(record.shape), sizes or record.shape, ())
    with ThreadPoolExecutor(2) as pool:
        return init.draw(record, seed, box, pool)


BOXES = [  # offsets and sizes
    ((0, 0, 0), (1, 100, 300)),
    ((0, 145, 0), (2, 145, 300)),  # a tensor-parallel half: two runs of rows
    ((1, 222, 17), (1, 68, 270)),
    ((0, 255, 255), (2, 2, 2)),
    ((1, 289, 299), (1, 1, 1)),
]


@pytest.mark.parametrize(("offsets", "sizes"), BOXES)
def test_a_box_is_a_part_of_the_whole_bit_for_bit(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    whole = draw(WEIGHT, seed=3)
    assert whole.shape == WEIGHT.shape
    box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    assert torch.equal(draw(WEIGHT, 3, offsets, sizes), whole[box])


def test_a_shard_draws_only_the_tiles_that_it_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[object] = []
    philox = np.random.Philox
    monkeypatch.setattr(np.random, "Philox", lambda key: keys.append(key) or philox(key=key))
    draw(ParameterRecord("w", (1024, 512), "normal", 1.0, True), 1, (256, 0), (256, 256))
    assert len(keys) == 1


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_all_ranks_are_the_parts_of_one_start(size: int) -> None:
    records = gpt_parameters(small(num_attention_heads=8, num_key_value_heads=2, ffn_hidden_size=32, qk_norm=True))
    whole = dict(start_values(records, 9))
    for index in range(size):
        parts = start_values(records, 9, held=partial(shard, size=size, index=index))
        for record, (name, values) in zip(records, parts, strict=True):
            assert torch.equal(values, cut(whole[name], shard(record, size, index)))


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

"""Shards: the counted boxes of all ranks of an axis tile the logical tensor, and each rank's boxes tile its own."""

from collections import defaultdict
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.checkpoint.manifest import is_tiled
from megalite.layout.parameters import ParameterRecord, ShardBox, Split, is_counted, is_held, shard
from megalite.layout.stages import StageSettings, stage_layers
from tests.layout.shards import cut

WORD = ParameterRecord("embedding.word.weight", (128, 8), "normal", 0.02, True, split=Split(0, uneven=True))
NORM = ParameterRecord("final_norm.weight", (8,), "ones", 0.0, False)
GROUPS = Split(0, replicated=2)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[ParameterRecord, int]:
    """A record of any kind of split and an axis size that is legal for it."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    size = draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["whole", "even", "uneven", "shared"]))
    split = None
    if kind == "even":
        shape[dim] *= size
        split = Split(dim, replicated=draw(st.integers(0, 3)))
    elif kind == "uneven":
        shape[dim] += size
        split = Split(dim, uneven=True)
    elif kind == "shared":
        sharers, tail, share = draw(st.integers(2, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
        size = shape[dim] * sharers
        shape[dim + 1 :] = [share * sharers + tail, *shape[dim + 1 :]]
        split = Split(dim, replicated=tail)
    return ParameterRecord("p", tuple(shape), "normal", 0.1, True, split=split), size


@given(sharded())
def test_counted_boxes_tile_the_logical_tensor_and_the_boxes_of_a_rank_its_own(
    case: tuple[ParameterRecord, int],
) -> None:
    record, size = case
    parts = [shard(record, size, index) for index in range(size)]
    counted = [(box.offsets, box.sizes) for part in parts for box in part.boxes if box.counted]
    assert is_tiled(record.shape, counted)
    for part in parts:
        assert is_tiled(part.shape, [(box.local_offsets, box.sizes) for box in part.boxes])
    uneven = record.split is not None and record.split.uneven
    assert len({part.shape for part in parts}) <= 1 + uneven


@given(sharded())
def test_replicas_are_consecutive_ranks_and_the_first_counts(case: tuple[ParameterRecord, int]) -> None:
    record, size = case
    holders: dict[tuple[int, ...], list[tuple[int, ShardBox]]] = defaultdict(list)
    for index in range(size):
        for box in shard(record, size, index).boxes:
            holders[box.offsets].append((index, box))
    for held in holders.values():
        first, box = held[0]
        assert first % box.replicas == 0
        assert [index for index, _ in held] == list(range(first, first + box.replicas))
        assert [copy.counted for _, copy in held] == [True] + [False] * (box.replicas - 1)
        assert {replace(copy, counted=True) for _, copy in held} == {box}


def test_ranks_that_share_a_group_divide_its_queries_and_each_hold_its_key_and_value() -> None:
    qkv = ParameterRecord("qkv", (2, 8 + 2, 10, 24), "normal", 0.02, True, split=GROUPS)
    parts = [shard(qkv, 4, index) for index in range(4)]
    assert {part.shape for part in parts} == {(1, 4 + 2, 10, 24)}
    assert parts[2].boxes == (
        ShardBox((1, 0, 0, 0), (1, 4, 10, 24), (0, 0, 0, 0)),
        ShardBox((1, 8, 0, 0), (1, 2, 10, 24), (0, 4, 0, 0), replicas=2),
    )
    assert parts[3].boxes == (
        ShardBox((1, 4, 0, 0), (1, 4, 10, 24), (0, 0, 0, 0)),
        ShardBox((1, 8, 0, 0), (1, 2, 10, 24), (0, 4, 0, 0), replicas=2, counted=False),
    )
    whole = torch.arange(prod(qkv.shape)).view(qkv.shape)
    assert torch.equal(cut(whole, parts[3])[0], torch.cat((whole[1, 4:8], whole[1, 8:])))


@pytest.mark.parametrize(
    ("shape", "split", "size"),
    [
        ((36, 24), Split(0), 5),
        ((2, 24), Split(0), 4),
        ((2, 24), Split(0, uneven=True), 4),
        ((2, 10, 3), GROUPS, 3),
        ((2, 9, 3), GROUPS, 4),
    ],
    ids=["even", "too few", "too few rows", "entries and ranks", "queries"],
)
def test_sizes_that_do_not_divide_are_no_shard(shape: tuple[int, ...], split: Split, size: int) -> None:
    with pytest.raises(AssertionError):
        shard(ParameterRecord("p", shape, "normal", 0.1, True, split=split), size, 0)


def test_a_stage_holds_its_layers_and_its_ends() -> None:
    stages = stage_layers(StageSettings(5, 3, layout="E|ttt|ttL"))

    def holders(place: int | tuple) -> list[bool]:
        return [is_held(replace(NORM, place=place), stage) for stage in stages]

    assert holders(0) == holders(2) == [False, True, False]
    assert holders(3) == holders(("loss",)) == [False, False, True]
    assert holders(("embedding",)) == [True, False, False]
    assert holders(("embedding", "loss")) == [True, False, True]
    assert holders(()) == [False, False, False]


def test_of_a_tied_embedding_the_stage_that_embeds_counts() -> None:
    tied = replace(WORD, place=("embedding", "loss"))
    [box] = shard(tied).boxes
    assert is_counted(tied, box, embedding=True)
    assert not is_counted(tied, box, embedding=False)
    assert all(is_counted(replace(NORM, place=place), box, embedding=False) for place in (0, 5, ("loss",)))
    assert not is_counted(NORM, shard(NORM, 2, 1).boxes[0], embedding=True), "the first rank of tp counts it"

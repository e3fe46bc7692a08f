"""The buffer layout: every element of every parameter has one place and one owner, on all ranks the same."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import prod
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.derive import derive_model
from megalite.config.schema import ModelConfig, MoEConfig
from megalite.layout.buffer_layout import (
    ALIGNMENT,
    Bucket,
    BufferLayout,
    BufferName,
    OwnedRange,
    SliceRange,
    buffer_layout,
    default_bucket_size,
    slice_ranges,
)
from megalite.layout.parameters import ParameterRecord, Split
from megalite.model.parameters import gpt_parameters

EVERYTHING = 10**9  # a bucket size that no model here reaches


@dataclass(frozen=True)
class Case:
    """A model in the order of its registration, and how it is laid out on `tp` (and `etp`) ranks."""

    records: tuple[ParameterRecord, ...]
    tp: int
    etp: int
    shards: int
    expert_shards: int
    bucket_size: int
    ownership: Literal["even", "whole"]

    def layout(self, tp_index: int = 0, etp_index: int = 0) -> BufferLayout:
        return buffer_layout(
            self.records,
            tp=(self.tp, tp_index),
            etp=(self.etp, etp_index),
            dense_shards=self.shards,
            expert_shards=self.expert_shards,
            bucket_size=self.bucket_size,
            ownership=self.ownership,
        )

    def layouts(self) -> Iterator[BufferLayout]:
        """Those of all ranks that hold different parts of the model."""
        for index in range(max(self.tp, self.etp)):
            yield self.layout(index % self.tp, index % self.etp)

    def owned(self, layout: BufferLayout) -> list[tuple[OwnedRange, ...]]:
        """What each rank owns; one that is none of those that share dense state (of experts) owns none of it."""
        ranks = max(self.shards, self.expert_shards)
        found = [layout.owned(index % self.shards, index % self.expert_shards) for index in range(ranks)]
        shards = {"dense": self.shards, "expert": self.expert_shards}
        return [
            tuple(each for each in owned if rank < shards[layout.buckets[each.bucket].buffer.kind])
            for rank, owned in enumerate(found)
        ]


@st.composite
def models(draw: st.DrawFn, tp: int, etp: int) -> tuple[ParameterRecord, ...]:
    """Embedding, blocks and head, of random parameters that can be split so."""
    rows = draw(st.integers(tp, 60))
    width, number = draw(st.sampled_from([1, 5, 19, 32, 64])), iter(range(1000))

    def parameter(place: Any, *, experts: int = 0) -> ParameterRecord:
        axis = etp if experts else tp
        kind = draw(st.sampled_from(["whole", "rows", "columns", *(() if experts else ("groups",))]))
        size = draw(st.integers(1, 12))
        shape, split = (size, width), None
        if kind == "rows":
            shape, split = (axis * size, width), Split(0)
        elif kind == "columns":
            shape, split = (width, axis * size), Split(1)
        elif kind == "groups":
            groups = draw(st.sampled_from([n for n in (1, 2, 4, 8) if axis % n == 0 or n % axis == 0]))
            shape, split = (groups, max(1, axis // groups) + 2, width), Split(0, replicated=2)
        stacked = draw(st.sampled_from([None, 0, 1] if kind == "whole" else [0]))
        over = ("tp",) if split is None and draw(st.booleans()) else ()
        decay, precision = draw(st.booleans()), "master" if draw(st.integers(0, 9)) == 0 else "model"
        if experts:
            shape, split = (experts, *shape), split and replace(split, dim=split.dim + 1)
            stacked = None if stacked is None else stacked + 1
        record = ParameterRecord(f"p{next(number)}", shape, "normal", 0.1, decay, place, split, over)
        return replace(record, of_experts=experts > 0, precision=precision, stacked=stacked)

    table = ParameterRecord("word", (rows, width), "normal", 0.1, True, ("embedding",), Split(0, uneven=True))
    tied = draw(st.booleans())
    records = [replace(table, place=("embedding", "loss"), partial_over=("word-embedding",)) if tied else table]
    records += [parameter(("embedding",)) for _ in range(draw(st.integers(0, 1)))]
    for layer in range(draw(st.integers(0, 4))):
        experts = draw(st.lists(st.sampled_from([0, 0, 1, 3]), min_size=1, max_size=5))
        records += [parameter(layer, experts=number) for number in experts]
    records += [parameter(("loss",)) for _ in range(draw(st.integers(0, 1)))]
    return tuple(records if tied else [*records, replace(table, name="head", place=("loss",))])


@st.composite
def cases(draw: st.DrawFn, *, ownership: str | None = None) -> Case:
    tp, etp = draw(st.sampled_from([(1, 1), (2, 2), (4, 4), (2, 1), (4, 2)]))
    return Case(
        draw(models(tp, etp)),
        tp,
        etp,
        draw(st.integers(1, 8)),
        draw(st.integers(1, 8)),
        draw(st.one_of(st.just(1), st.integers(1, 30).map(lambda units: units * ALIGNMENT), st.just(EVERYTHING))),
        draw(st.sampled_from(["even", "whole"])) if ownership is None else ownership,
    )


def numbered(layout: BufferLayout) -> tuple[dict[BufferName, np.ndarray], dict[str, np.ndarray]]:
    """Every element of every parameter with a number of its own, by name; and the buffers that hold them, else -1."""
    buffers = {name: np.full(size, -1) for name, size in layout.sizes.items()}
    values, count = {}, 0
    for bucket in layout.buckets:
        for slot in bucket.slots:
            size = prod(slot.shard.shape)
            values[slot.record.name] = np.arange(count, count + size)
            place = buffers[bucket.buffer][slot.start : slot.stop]
            assert (place == -1).all(), "two parameters share an element"
            place[:] = values[slot.record.name]
            count += size
    return buffers, values


def at(array: np.ndarray, where: range) -> list[int]:
    assert 0 <= where.start <= where.stop <= len(array)
    return array[where.start : where.stop].tolist()


def names(bucket: Bucket) -> list[str]:
    return [slot.record.name for slot in bucket.slots]


def is_table(record: ParameterRecord) -> bool:
    return record.name in ("word", "head")


def padded(record: ParameterRecord, layout: BufferLayout) -> int:
    slot = next(slot for slot in layout.slots if slot.record.name == record.name)
    return -(-prod(slot.shard.shape) // ALIGNMENT) * ALIGNMENT


# --- places ------------------------------------------------------------------------------------------------------


@given(cases())
@settings(deadline=None)
def test_buckets_tile_the_buffers_and_hold_every_parameter_once(case: Case) -> None:
    for layout in case.layouts():
        assert sorted(slot.record.name for slot in layout.slots) == sorted(record.name for record in case.records)
        ends: dict[BufferName, int] = {}
        for bucket in layout.buckets:
            assert bucket.start == ends.get(bucket.buffer, 0)
            ends[bucket.buffer] = bucket.stop
            cursor = bucket.start
            for slot in bucket.slots:
                assert slot.start % ALIGNMENT == 0
                assert slot.start >= cursor
                cursor = slot.stop
            assert cursor <= bucket.stop
        assert ends == layout.sizes


@given(cases())
@settings(deadline=None)
def test_slices_tile_every_bucket_in_equal_aligned_parts(case: Case) -> None:
    for layout in case.layouts():
        for bucket in layout.buckets:
            assert bucket.shards == (case.shards if bucket.buffer.kind == "dense" else case.expert_shards)
            slices = [bucket.slice_of(index) for index in range(bucket.shards)]
            assert slices[0].start == bucket.start
            assert slices[-1].stop == bucket.stop
            assert all(one.stop == other.start for one, other in pairwise(slices))
            assert {len(each) for each in slices} == {bucket.slice_size}
            assert bucket.start % ALIGNMENT == bucket.slice_size % ALIGNMENT == 0


@given(cases())
@settings(deadline=None)
def test_a_buffer_holds_one_precision_kind_and_ownership(case: Case) -> None:
    for bucket in case.layout().buckets:
        for slot in bucket.slots:
            kind = "expert" if slot.record.of_experts else "dense"
            whole = case.ownership == "whole" and slot.record.stacked is not None
            assert bucket.buffer == BufferName(slot.record.precision, kind, whole)


@given(cases(ownership="even"))
@settings(deadline=None)
def test_backward_completes_buffers_from_start_to_end_and_buckets_in_their_order(case: Case) -> None:
    layout = case.layout()
    backward = [record.name for record in reversed(case.records)]
    for name in layout.sizes:
        stored = [each for bucket in layout.buckets if bucket.buffer == name for each in names(bucket)]
        assert stored == [each for each in backward if each in stored]
    completed = [max(backward.index(name) for name in names(bucket)) for bucket in layout.buckets]
    assert completed == sorted(completed)


# --- owners ------------------------------------------------------------------------------------------------------


@given(cases())
@settings(deadline=None)
def test_every_element_of_every_parameter_has_one_owner(case: Case) -> None:
    for layout in case.layouts():
        ranges: dict[str, list[range]] = {slot.record.name: [] for slot in layout.slots}
        for owned in case.owned(layout):
            for each in owned:
                ranges[each.slot.record.name].append(each.in_parameter)
        for slot in layout.slots:
            cursor = 0
            for part in sorted(ranges[slot.record.name], key=lambda part: part.start):
                assert part.start == cursor
                assert len(part) > 0
                cursor = part.stop
            assert cursor == prod(slot.shard.shape)


@given(cases())
@settings(deadline=None)
def test_the_ranges_of_what_a_rank_owns_show_the_same_elements(case: Case) -> None:
    for layout in case.layouts():
        buffers, values = numbered(layout)
        for rank, owned in enumerate(case.owned(layout)):
            slices = []
            for bucket in layout.buckets:
                own = bucket.slice_of(rank % bucket.shards)
                slices.append(buffers[bucket.buffer][own.start : own.stop])
            for each in owned:
                bucket = layout.buckets[each.bucket]
                assert each.slot in bucket.slots
                expected = at(values[each.slot.record.name], each.in_parameter)
                assert at(buffers[bucket.buffer], each.in_buffer) == expected
                assert at(slices[each.bucket], each.in_slice) == expected


def test_dense_parameters_and_experts_have_owners_of_their_own() -> None:
    dense = ParameterRecord("dense", (128,), "normal", 0.1, True, 0)
    layout = buffer_layout([dense, replace(dense, name="expert", of_experts=True)], dense_shards=2, expert_shards=1)
    found = [[(each.slot.record.name, each.in_parameter) for each in layout.owned(dense, 0)] for dense in range(2)]
    assert found[0] == [("expert", range(128)), ("dense", range(64))]
    assert found[1] == [("expert", range(128)), ("dense", range(64, 128))]


# --- buckets -----------------------------------------------------------------------------------------------------


def blocks_of(case: Case, layout: BufferLayout) -> list[list[ParameterRecord]]:
    """Of each buffer, neighbours at one place of the model; tables of the vocabulary are none."""
    found = []
    for name in layout.sizes:
        held = [slot.record for bucket in layout.buckets if bucket.buffer == name for slot in bucket.slots]
        for (_, table), members in groupby(held, key=lambda record: (record.place, is_table(record))):
            found += [] if table else [list(members)]
    return found


@given(cases(ownership="even"))
@settings(deadline=None)
def test_a_block_that_fits_into_a_bucket_is_not_cut_and_a_larger_one_where_the_size_is_reached(case: Case) -> None:
    layout = case.layout()
    number = {name: at for at, bucket in enumerate(layout.buckets) for name in names(bucket)}
    sizes = [sum(padded(slot.record, layout) for slot in bucket.slots) for bucket in layout.buckets]
    for block in blocks_of(case, layout):
        used = [number[record.name] for record in block]
        if sum(padded(record, layout) for record in block) <= case.bucket_size:
            assert len(set(used)) == 1
        else:
            assert all(sizes[each] >= case.bucket_size for each in used if each != used[-1])


@given(cases(ownership="even"))
@settings(deadline=None)
def test_a_bucket_has_as_many_blocks_as_fit(case: Case) -> None:
    layout = case.layout()
    blocks = {record.name: block for block in blocks_of(case, layout) for record in block}
    for bucket, following in neighbours(layout):
        held = [slot.record for bucket in (bucket, following) for slot in bucket.slots]
        if not any(map(is_table, held)):
            content = sum(padded(slot.record, layout) for slot in bucket.slots)
            block = sum(padded(record, layout) for record in blocks[following.slots[0].record.name])
            assert content + block > case.bucket_size
    for bucket in layout.buckets:  # what is left of a block joins its last bucket where it is less than another one
        assert sum(padded(slot.record, layout) for slot in bucket.slots[:-1]) < 2 * case.bucket_size


def neighbours(layout: BufferLayout) -> Iterator[tuple[Bucket, Bucket]]:
    """Each bucket and the next one of its buffer."""
    for name in layout.sizes:
        yield from pairwise([bucket for bucket in layout.buckets if bucket.buffer == name])


@given(cases())
@settings(deadline=None)
def test_tables_of_the_vocabulary_stand_alone_and_are_cut_evenly(case: Case) -> None:
    for layout in case.layouts():
        for bucket in layout.buckets:
            if any(is_table(slot.record) for slot in bucket.slots):
                assert len(bucket.slots) == 1
                unit = ALIGNMENT * bucket.shards
                assert bucket.stop - bucket.start == -(-prod(bucket.slots[0].shard.shape) // unit) * unit


def test_a_large_block_is_cut_where_a_bucket_has_reached_its_size() -> None:
    sizes = [64, 64, 128, 192, 64]
    records = [ParameterRecord(f"p{at}", (size,), "normal", 0.1, True, 0) for at, size in enumerate(sizes)]
    records.append(ParameterRecord("norm", (1,), "ones", 0.0, False, ("loss",)))
    for target, expected in ((128, [[1], [64, 192], [128], [64, 64]]), (192, [[1], [64, 192], [128, 64, 64]])):
        layout = buffer_layout(records, bucket_size=target)
        assert [[slot.stop - slot.start for slot in bucket.slots] for bucket in layout.buckets] == expected


def test_both_ends_of_a_pipeline_cut_a_tied_table_alike() -> None:
    config = derive_model(ModelConfig(vocab_size=200, num_layers=4), 16)
    records = gpt_parameters(config)
    first = [record for record in records if record.place in (0, 1) or "embedding" in str(record.place)]
    last = [record for record in records if record.place in (2, 3) or "loss" in str(record.place)]
    cuts = []
    for stage in (first, last):
        layout = buffer_layout(stage, dense_shards=3)
        cuts.append([each for each in layout.owned(1) if each.slot.record.name == "embedding.word.weight"])
    ((one,), (other,)) = cuts
    assert (one.in_parameter, one.in_slice) == (other.in_parameter, other.in_slice)


def test_a_bucket_is_as_large_as_its_ranks_are_many() -> None:
    assert default_bucket_size(4) == 40_000_000
    assert default_bucket_size(100) == 100_000_000
    config = derive_model(ModelConfig(vocab_size=200, num_layers=3, hidden_size=2048, num_attention_heads=16), 16)
    block = sum(record.numel for record in gpt_parameters(config) if record.place == 0)
    assert 2 * block < 102_000_000 < 3 * block
    records = gpt_parameters(config)
    assert [len(bucket.slots) for bucket in buffer_layout(records, dense_shards=102).buckets] == [1 + 2 * 6, 6, 1]


def test_buckets_of_gpt2_end_at_blocks() -> None:
    config = ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=50257, max_positions=1024)
    config = replace(config, position="learned", norm="layernorm", activation="gelu", bias=True)
    layout = buffer_layout(gpt_parameters(derive_model(config, 1024)), dense_shards=4)
    ends = [(bucket.stop - bucket.start, names(bucket)[0], names(bucket)[-1]) for bucket in layout.buckets]
    block, norm, unit = 7_087_872, 2 * 768, 4 * ALIGNMENT
    assert ends == [
        (5 * block + norm, "final_norm.bias", "blocks.7.attention_norm.weight"),
        (5 * block, "blocks.6.mlp.down.bias", "blocks.2.attention_norm.weight"),
        (2 * block + 1024 * 768, "blocks.1.mlp.down.bias", "embedding.position.weight"),
        (50304 * 768, "embedding.word.weight", "embedding.word.weight"),
    ]
    assert all(size % unit == 0 for size, _, _ in ends)


# --- whole matrices ----------------------------------------------------------------------------------------------


@given(cases(ownership="whole"))
@settings(deadline=None)
def test_with_whole_ownership_each_matrix_has_one_owner_and_all_else_is_cut_evenly(case: Case) -> None:
    for layout in case.layouts():
        for owned in case.owned(layout):
            for each in (each for each in owned if each.slot.record.stacked is not None):
                shape = each.slot.shard.shape
                matrix = prod(shape[each.slot.record.stacked :])
                if matrix % ALIGNMENT:
                    matrix = prod(shape)
                assert each.in_parameter.start % matrix == each.in_parameter.stop % matrix == 0
        for bucket in (bucket for bucket in layout.buckets if not bucket.buffer.whole):
            content = sum(padded(slot.record, layout) for slot in bucket.slots)
            assert bucket.stop - bucket.start - content < ALIGNMENT * bucket.shards


@given(cases(ownership="whole"))
@settings(deadline=None)
def test_whole_ownership_pads_no_more_than_a_fifth_where_a_buffer_has_several_buckets(case: Case) -> None:
    layout = case.layout()
    for one, other in neighbours(layout):
        for bucket in (bucket for bucket in (one, other) if bucket.buffer.whole):
            assert 5 * sum(padded(slot.record, layout) for slot in bucket.slots) >= 4 * (bucket.stop - bucket.start)


LLAMA_8B = ModelConfig(num_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8)
LLAMA_8B = replace(LLAMA_8B, ffn_hidden_size=14336, vocab_size=128256, tie_embeddings=False)
QWEN_30B = ModelConfig(num_layers=48, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_size=128)
QWEN_30B = replace(QWEN_30B, vocab_size=151936, moe=MoEConfig(num_experts=128, top_k=8, ffn_hidden_size=768))


@pytest.mark.parametrize(
    ("model", "dp", "ep", "most", "buckets"),
    [(LLAMA_8B, 8, 1, 0.07, 16), (LLAMA_8B, 64, 1, 0.07, 2), (LLAMA_8B, 128, 1, 0.07, 1), (QWEN_30B, 64, 8, 0.07, 49)],
)
def test_whole_matrices_of_real_models_take_little_padding(
    model: ModelConfig, dp: int, ep: int, most: float, buckets: int
) -> None:
    records, begin = gpt_parameters(derive_model(model, 4096)), time.process_time()
    layout = buffer_layout(records, ep=(ep, 1), dense_shards=dp, expert_shards=dp // ep, ownership="whole")
    assert time.process_time() - begin < 1
    filled = sum(prod(slot.shard.shape) for slot in layout.slots)
    assert 1 - filled / sum(layout.sizes.values()) < most
    assert sum(bucket.buffer.whole for bucket in layout.buckets) >= buckets


# --- the same on all ranks ---------------------------------------------------------------------------------------


@given(cases())
@settings(deadline=None)
def test_ranks_own_equal_slices_of_what_they_replicate_even_with_an_uneven_vocabulary(case: Case) -> None:
    """What tensor-parallel ranks do with the gradients of which each has a part: they add up their slices."""
    layouts = list(case.layouts())
    for dense in range(case.shards):
        partial = [
            slice_ranges(one.owned(dense, dense % case.expert_shards), lambda record, _: "tp" in record.partial_over)
            for one in layouts
        ]
        assert all(other == partial[0] for other in partial)
        if case.tp == case.etp:
            shared = [slice_ranges(one.owned(dense), lambda _, box: box.replicas > 1) for one in layouts]
            assert all(other == shared[0] for other in shared)


@given(cases())
@settings(deadline=None)
def test_an_uneven_vocabulary_changes_the_tables_buckets_and_nothing_else(case: Case) -> None:
    def others(layout: BufferLayout) -> list[Any]:
        return [
            [(slot.record, slot.start - bucket.start) for slot in bucket.slots]
            for bucket in layout.buckets
            if not is_table(bucket.slots[0].record)
        ]

    first, *rest = case.layouts()
    assert all([names(one) for one in layout.buckets] == [names(one) for one in first.buckets] for layout in rest)
    assert all(others(layout) == others(first) for layout in rest)


# --- ranges ------------------------------------------------------------------------------------------------------


def covered(ranges: Sequence[SliceRange], layout: BufferLayout) -> list[np.ndarray]:
    """For each bucket how often each element of the rank's slice is in a range."""
    counts = [np.zeros(bucket.slice_size, dtype=int) for bucket in layout.buckets]
    for each in ranges:
        assert 0 <= each.start < each.stop <= len(counts[each.bucket])
        counts[each.bucket][each.start : each.stop] += 1
    return counts


def slices_of(arrays: dict[BufferName, np.ndarray], layout: BufferLayout, index: int) -> list[np.ndarray]:
    """A rank's slices of buffers, by brute force: the bucket's elements in so many equal rows."""
    return [
        arrays[bucket.buffer][bucket.start : bucket.stop].reshape(bucket.shards, -1)[index % bucket.shards]
        for bucket in layout.buckets
    ]


@given(cases(), st.integers(0, 7))
@settings(deadline=None)
def test_slice_ranges_are_the_wanted_elements_in_as_few_ranges_as_can_be(case: Case, index: int) -> None:
    layout = case.layout()
    wanted = {name: np.zeros(size, dtype=int) for name, size in layout.sizes.items()}  # 1: wanted, -1: not
    for bucket in layout.buckets:
        for slot in bucket.slots:
            wanted[bucket.buffer][slot.start : slot.stop] = 1 if slot.record.decay else -1
    owned = layout.owned(index % case.shards, index % case.expert_shards)
    ranges = slice_ranges(owned, lambda record, _: record.decay)
    for found, is_wanted in zip(covered(ranges, layout), slices_of(wanted, layout, index), strict=True):
        assert set(found) <= {0, 1}
        assert (found[is_wanted == 1] == 1).all()
        assert (found[is_wanted != 1] == 0).all()
    for one, other in pairwise(ranges):
        assert (one.bucket, one.stop) < (other.bucket, other.start)


@given(cases(), st.integers(0, 7))
@settings(deadline=None)
def test_ranges_of_boxes_are_the_elements_of_the_wanted_boxes(case: Case, index: int) -> None:
    for layout in case.layouts():
        counted = {name: np.zeros(size, dtype=int) for name, size in layout.sizes.items()}
        for bucket in layout.buckets:
            for slot in bucket.slots:
                whole = counted[bucket.buffer][slot.start : slot.stop].reshape(slot.shard.shape)
                for box in slot.shard.boxes:
                    whole[box.local] = 1 if box.counted else -1
        owned = layout.owned(index % case.shards, index % case.expert_shards)
        ranges = covered(slice_ranges(owned, lambda _, box: box.counted), layout)
        for found, is_counted in zip(ranges, slices_of(counted, layout, index), strict=True):
            assert (found[is_counted == 1] == 1).all()
            assert (found[is_counted != 1] == 0).all()


def test_neighbouring_ranges_of_different_buckets_stay_apart() -> None:
    records = [ParameterRecord(f"p{at}", (64,), "normal", 0.1, True, at // 2) for at in range(4)]
    owned = buffer_layout(records, bucket_size=128).owned()
    assert slice_ranges(owned, lambda record, box: True) == [SliceRange(0, 0, 128), SliceRange(1, 0, 128)]
    assert slice_ranges(owned, lambda record, _: record.name != "p3") == [SliceRange(0, 64, 128), SliceRange(1, 0, 128)]
    assert slice_ranges(owned, lambda record, box: False) == []

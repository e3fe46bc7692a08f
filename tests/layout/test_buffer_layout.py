"""The buffer layout: every element of every parameter has one place and one owner, on all ranks the same."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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
    BufferSlot,
    Kind,
    OwnedRange,
    buffer_layout,
    slice_ranges,
)
from megalite.layout.matrices import owned_matrices, work_of_ranks
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
            tuple(each for each in owned if rank < shards[layout.buckets[each.bucket].kind])
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


def alike(bucket: Bucket) -> tuple[str, str, bool]:
    """What the parameters of a bucket share."""
    return bucket.precision, bucket.kind, bucket.whole


def names(bucket: Bucket) -> list[str]:
    return [slot.record.name for slot in bucket.slots]


def slots(layout: BufferLayout) -> list[BufferSlot]:
    return [slot for bucket in layout.buckets for slot in bucket.slots]


def is_table(record: ParameterRecord) -> bool:
    return record.name in ("word", "head")


def padded(record: ParameterRecord, layout: BufferLayout) -> int:
    slot = next(slot for slot in slots(layout) if slot.record.name == record.name)
    return -(-prod(slot.shard.shape) // ALIGNMENT) * ALIGNMENT


def numbered(layout: BufferLayout) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Every element of every parameter with a number of its own, by name; and the buckets that hold them, else -1."""
    buckets, values, count = [np.full(bucket.size, -1) for bucket in layout.buckets], {}, 0
    for array, bucket in zip(buckets, layout.buckets, strict=True):
        for slot in bucket.slots:
            assert (array[slot.start : slot.stop] == -1).all(), "two parameters share an element"
            values[slot.record.name] = array[slot.start : slot.stop] = np.arange(count, count + slot.stop - slot.start)
            count += slot.stop - slot.start
    return buckets, values


# --- places ------------------------------------------------------------------------------------------------------


@given(cases())
@settings(deadline=None)
def test_every_parameter_has_an_aligned_place_in_one_bucket_of_equal_aligned_slices(case: Case) -> None:
    for layout in case.layouts():
        assert sorted(slot.record.name for slot in slots(layout)) == sorted(record.name for record in case.records)
        for bucket in layout.buckets:
            assert bucket.shards == (case.shards if bucket.kind == "dense" else case.expert_shards)
            assert bucket.slice_size * bucket.shards == bucket.size
            assert bucket.slice_size % ALIGNMENT == 0
            assert all(slot.start % ALIGNMENT == 0 and slot.stop <= bucket.size for slot in bucket.slots)
            assert all(one.stop <= other.start for one, other in pairwise(bucket.slots))
            for slot in bucket.slots:
                kind: Literal["expert", "dense"] = "expert" if slot.record.of_experts else "dense"
                whole = case.ownership == "whole" and slot.record.stacked is not None
                assert alike(bucket) == (slot.record.precision, kind, whole)


@given(cases(ownership="even"))
@settings(deadline=None)
def test_backward_completes_buffers_from_start_to_end_and_buckets_in_their_order(case: Case) -> None:
    layout = case.layout()
    backward = [record.name for record in reversed(case.records)]
    for buffer in {alike(bucket) for bucket in layout.buckets}:
        stored = [each for bucket in layout.buckets if alike(bucket) == buffer for each in names(bucket)]
        assert stored == [each for each in backward if each in stored]
    completed = [max(backward.index(name) for name in names(bucket)) for bucket in layout.buckets]
    assert completed == sorted(completed)


# --- owners ------------------------------------------------------------------------------------------------------


@given(cases())
@settings(deadline=None)
def test_every_element_has_one_owner_and_its_ranges_show_the_same_elements(case: Case) -> None:
    for layout in case.layouts():
        buckets, values = numbered(layout)
        seen: dict[str, list[int]] = {name: [] for name in values}
        for rank, owned in enumerate(case.owned(layout)):
            for each in owned:
                bucket = layout.buckets[each.bucket]
                own = buckets[each.bucket].reshape(bucket.shards, -1)[rank % bucket.shards]
                mine = own[each.in_slice.start : each.in_slice.stop].tolist()
                name = each.slot.record.name
                assert mine == values[name][each.in_parameter.start : each.in_parameter.stop].tolist()
                assert len(mine) == len(each.in_parameter) == len(each.in_slice) > 0
                local = np.arange(prod(each.slot.shard.shape)).reshape(each.slot.shard.shape)[each.box.local].ravel()
                assert local[each.in_box.start : each.in_box.stop].tolist() == [*each.in_parameter]
                seen[name] += mine
        assert {name: sorted(numbers) for name, numbers in seen.items()} == {
            name: value.tolist() for name, value in values.items()
        }


# --- buckets -----------------------------------------------------------------------------------------------------


def neighbours(layout: BufferLayout) -> Iterator[tuple[Bucket, Bucket]]:
    """Each bucket and the next one of its buffer; tables of the vocabulary left out."""
    for buffer in {alike(bucket) for bucket in layout.buckets}:
        of_buffer = [one for one in layout.buckets if alike(one) == buffer]
        yield from pairwise([one for one in of_buffer if not is_table(one.slots[0].record)])


def test_buckets_of_gpt2_end_at_blocks_and_are_as_large_as_ranks_are_many() -> None:
    config = ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=50257, max_positions=1024)
    config = replace(config, position="learned", norm="layernorm", activation="gelu", bias=True)
    records = gpt_parameters(derive_model(config, 1024))
    ends = [(one.size, names(one)[0], names(one)[-1]) for one in buffer_layout(records, dense_shards=4).buckets]
    block, norm = 7_087_872, 2 * 768
    assert ends == [
        (5 * block + norm, "final_norm.bias", "blocks.7.attention_norm.weight"),
        (5 * block, "blocks.6.mlp.down.bias", "blocks.2.attention_norm.weight"),
        (2 * block + 1024 * 768, "blocks.1.mlp.down.bias", "embedding.position.weight"),
        (50304 * 768, "embedding.word.weight", "embedding.word.weight"),
    ]
    assert len(buffer_layout(records, dense_shards=100).buckets) == 2


@given(cases())
@settings(deadline=None)
def test_tables_of_the_vocabulary_stand_alone_and_are_cut_evenly(case: Case) -> None:
    for layout in case.layouts():
        for bucket in layout.buckets:
            if any(is_table(slot.record) for slot in bucket.slots):
                assert len(bucket.slots) == 1
                unit = ALIGNMENT * bucket.shards
                assert bucket.size == -(-prod(bucket.slots[0].shard.shape) // unit) * unit


# --- whole matrices ----------------------------------------------------------------------------------------------


@given(cases(ownership="whole"))
@settings(deadline=None)
def test_with_whole_ownership_each_matrix_has_one_owner_and_all_else_is_cut_evenly(case: Case) -> None:
    for layout in case.layouts():
        owners = dict[tuple[str, int], int]()
        for rank, owned in enumerate(case.owned(layout)):
            for each in (each for each in owned if each.slot.record.stacked is not None):
                shape = each.slot.shard.shape
                matrix = prod(shape[each.slot.record.stacked :])
                if matrix % ALIGNMENT:
                    matrix = prod(shape)
                for at in {each.in_parameter.start // matrix, (each.in_parameter.stop - 1) // matrix}:
                    assert owners.setdefault((each.slot.record.name, at), rank) == rank
        for bucket in (bucket for bucket in layout.buckets if not bucket.whole):
            content = sum(padded(slot.record, layout) for slot in bucket.slots)
            assert bucket.size - content < ALIGNMENT * bucket.shards


@given(cases(ownership="whole"))
@settings(deadline=None)
def test_whole_ownership_pads_no_more_than_a_fifth_where_a_buffer_has_several_buckets(case: Case) -> None:
    layout = case.layout()
    for one, other in neighbours(layout):
        for bucket in (bucket for bucket in (one, other) if bucket.whole):
            assert 5 * sum(padded(slot.record, layout) for slot in bucket.slots) >= 4 * (bucket.size)


LLAMA_8B = ModelConfig(num_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8)
LLAMA_8B = replace(LLAMA_8B, ffn_hidden_size=14336, vocab_size=128256, tie_embeddings=False)
QWEN_30B = ModelConfig(num_layers=48, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_size=128)
QWEN_30B = replace(QWEN_30B, vocab_size=151936, moe=MoEConfig(num_experts=128, top_k=8, ffn_hidden_size=768))


REAL = [(LLAMA_8B, 8, 1), (LLAMA_8B, 64, 1), (LLAMA_8B, 128, 1), (QWEN_30B, 64, 8)]


@pytest.mark.parametrize(
    ("model", "dp", "ep", "most", "buckets"),
    [(*real, 0.07, buckets) for real, buckets in zip(REAL, (16, 2, 1, 49), strict=True)],
)
def test_whole_matrices_of_real_models_take_little_padding(
    model: ModelConfig, dp: int, ep: int, most: float, buckets: int
) -> None:
    records, begin = gpt_parameters(derive_model(model, 4096)), time.process_time()
    layout = buffer_layout(records, ep=(ep, 1), dense_shards=dp, expert_shards=dp // ep, ownership="whole")
    assert time.process_time() - begin < 1
    filled = sum(prod(slot.shard.shape) for slot in slots(layout))
    assert 1 - filled / sum(bucket.size for bucket in layout.buckets) < most
    assert sum(bucket.whole for bucket in layout.buckets) >= buckets


def longest_first(work: Sequence[int], ranks: int) -> list[int]:
    """What each rank has to do, where each piece goes to the one with the least."""
    load = [0] * ranks
    for each in sorted(work, reverse=True):
        load[load.index(min(load))] += each
    return load


@pytest.mark.parametrize(("model", "dp", "ep"), [*REAL, (replace(LLAMA_8B, num_layers=3), 4, 1)])
def test_no_owner_has_more_work_than_if_matrices_could_lie_anywhere(model: ModelConfig, dp: int, ep: int) -> None:
    """Nor has one less than two thirds of the mean. The work of all buckets counts, that of experts for itself."""
    records = gpt_parameters(derive_model(model, 4096))
    layout = buffer_layout(records, ep=(ep, 1), dense_shards=dp, expert_shards=dp // ep, ownership="whole")
    kinds: tuple[Kind, ...] = ("dense", "expert")
    for kind, ranks in zip(kinds, (dp, dp // ep), strict=True):
        for homes in (1, 2):
            work = work_of_ranks(layout, kind, ranks, homes)
            total = [each.record.work for rank in range(ranks) for each in owned_matrices(layout, kind, rank)]
            assert sum(work) == sum(total)
            assert max(work) <= 1.001 * max(longest_first(total, ranks * homes))
            assert homes > 1 or min(work) >= sum(total) / ranks * 2 / 3


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


# --- ranges ------------------------------------------------------------------------------------------------------


@given(cases(), st.integers(0, 7), st.booleans())
@settings(deadline=None)
def test_slice_ranges_are_the_wanted_elements_in_as_few_ranges_as_can_be(case: Case, index: int, boxes: bool) -> None:
    for layout in case.layouts():
        wanted = [np.zeros(bucket.size, dtype=int) for bucket in layout.buckets]
        for array, bucket in zip(wanted, layout.buckets, strict=True):
            for slot in bucket.slots:
                whole = array[slot.start : slot.stop].reshape(slot.shard.shape)
                for box in slot.shard.boxes:
                    whole[box.local] = box.counted if boxes else slot.record.decay
        owned = layout.owned(index % case.shards, index % case.expert_shards)
        ranges = slice_ranges(owned, lambda record, box: box.counted if boxes else record.decay)
        found = [np.zeros(bucket.slice_size, dtype=int) for bucket in layout.buckets]
        for each in ranges:
            found[each.bucket][each.start : each.stop] += 1
        for covered, array, bucket in zip(found, wanted, layout.buckets, strict=True):
            assert (covered == array.reshape(bucket.shards, -1)[index % bucket.shards]).all()
        assert all((one.bucket, one.stop) < (other.bucket, other.start) for one, other in pairwise(ranges))

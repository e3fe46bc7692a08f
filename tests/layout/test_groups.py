"""The groups of a rank as records: who is in them, in which order they are made, what they may share."""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.layout.groups import GroupNeeds, all_groups, groups_of
from megalite.layout.ranks import ParallelLayout
from tests.layout.test_ranks import layouts

CUBE = ParallelLayout(tp=2, cp=2, dp=2, pp=2, etp=1, ep=4)


def ranks(layout: ParallelLayout, rank: int, name: str, needs: GroupNeeds | None = None) -> Sequence[int]:
    return groups_of(layout, rank, needs or GroupNeeds())[name].ranks


def test_the_order_in_which_groups_are_made_is_fixed() -> None:
    needs = GroupNeeds(
        tied_embeddings=True, kv_heads=1, optimizer_instances=2, cp_levels=(2, 1), background_saving=True
    )
    assert list(groups_of(CUBE, 0, needs)) == [
        *("dp-cp", "dp", "edp", "dp-cp-shard", "dp-cp-replicate", "edp-shard", "edp-replicate", "instance"),
        *("tp-pp", "tp-dp", "tp-dp-cp", "etp-ep-pp", "world", "kv-replicas"),
        *("tp", "tp-cp", "cp", "cp-level-0", "cp-level-1", "ep", "etp", "etp-ep"),
        *("pp-forward", "pp-backward", "saving"),
        *("embedding", "position-embedding"),
    ]


def test_a_dense_model_has_no_expert_groups() -> None:
    names = set(groups_of(ParallelLayout(tp=2, dp=2), 0, GroupNeeds()))
    assert not names & {"ep", "etp", "edp", "etp-ep", "etp-ep-pp"}


def test_the_embedding_group_joins_first_and_last_stage_where_embeddings_are_tied() -> None:
    layout = ParallelLayout(tp=2, pp=4)
    tied, untied = GroupNeeds(tied_embeddings=True), GroupNeeds()
    assert [ranks(layout, rank, "embedding", tied) for rank in (0, 1, 6, 7)] == [(0, 6), (1, 7), (0, 6), (1, 7)]
    assert all("embedding" not in groups_of(layout, rank, tied) for rank in (2, 3, 4, 5))
    assert ranks(layout, 0, "embedding", untied) == ranks(layout, 0, "position-embedding", tied) == (0,)
    assert "embedding" not in groups_of(layout, 6, untied)


def test_one_stage_holds_all_embeddings_alone() -> None:
    assert ranks(ParallelLayout(tp=2), 1, "embedding", GroupNeeds(tied_embeddings=True)) == (1,)


def test_the_first_decoder_stage_holds_embeddings_too() -> None:
    needs = GroupNeeds(tied_embeddings=True, split_rank=2)
    layout = ParallelLayout(tp=2, pp=4)
    assert ranks(layout, 4, "embedding", needs) == (0, 4, 6)
    assert ranks(layout, 4, "position-embedding", needs) == (0, 4)
    assert "position-embedding" not in groups_of(layout, 6, needs)
    at_the_end = GroupNeeds(tied_embeddings=True, split_rank=3)
    assert ranks(layout, 6, "embedding", at_the_end) == (0, 6)


def test_ranks_that_share_a_key_value_head_are_neighbours_along_tp() -> None:
    layout = ParallelLayout(tp=4, dp=2)
    assert [ranks(layout, rank, "kv-replicas", GroupNeeds(kv_heads=2)) for rank in (0, 3, 5)] == [
        (0, 1),
        (2, 3),
        (4, 5),
    ]
    assert ranks(layout, 6, "kv-replicas", GroupNeeds(kv_heads=1)) == (4, 5, 6, 7)
    assert "kv-replicas" not in groups_of(layout, 0, GroupNeeds(kv_heads=4))


def test_optimizer_instances_are_slices_of_the_replicas() -> None:
    layout, needs = ParallelLayout(tp=2, dp=4, pp=2), GroupNeeds(optimizer_instances=2)
    assert ranks(layout, 0, "dp-cp") == (0, 2, 4, 6)
    assert ranks(layout, 0, "dp-cp-shard", needs) == (0, 2)
    assert ranks(layout, 4, "dp-cp-shard", needs) == (4, 6)
    assert ranks(layout, 0, "dp-cp-replicate", needs) == (0, 4)
    assert ranks(layout, 0, "instance", needs) == (0, 1, 2, 3, 8, 9, 10, 11)
    assert ranks(layout, 14, "instance", needs) == (4, 5, 6, 7, 12, 13, 14, 15)


def test_instances_of_experts_are_slices_of_their_replicas() -> None:
    layout, needs = ParallelLayout(tp=2, dp=8, etp=1, ep=4), GroupNeeds(optimizer_instances=2)
    assert ranks(layout, 1, "edp") == (1, 5, 9, 13)
    assert ranks(layout, 1, "edp-shard", needs) == (1, 5)
    assert ranks(layout, 1, "edp-replicate", needs) == (1, 9)
    assert ranks(layout, 1, "instance", needs) == tuple(range(8))


@pytest.mark.parametrize("layout", [ParallelLayout(), CUBE, replace(CUBE, rank_offset=8), ParallelLayout(tp=2, dp=3)])
def test_the_world_is_one_group_of_all_ranks(layout: ParallelLayout) -> None:
    everyone = tuple(range(layout.rank_offset, layout.rank_offset + layout.world_size))
    needs = GroupNeeds(background_saving=True)
    for rank in everyone:
        specs = groups_of(layout, rank, needs)
        assert specs["world"].ranks == specs["saving"].ranks == everyone
        assert (specs["world"].traffic, specs["world"].on_host) == ("gradient", False)
    listed = [spec.name for spec in all_groups(layout, needs)]
    assert listed.count("world") == listed.count("saving") == (layout.world_size > 1)


def test_writing_behind_training_has_a_group_of_its_own_on_the_host_and_only_where_it_is_needed() -> None:
    specs = groups_of(ParallelLayout(dp=2), 0, GroupNeeds(background_saving=True))
    assert specs["saving"].on_host
    assert [name for name, spec in specs.items() if spec.traffic == specs["saving"].traffic] == ["saving"]
    assert "saving" not in groups_of(ParallelLayout(dp=2), 0, GroupNeeds())


def test_levels_of_context_parallelism_start_with_neighbours() -> None:
    layout, needs = ParallelLayout(cp=8), GroupNeeds(cp_levels=(2, 4))
    assert ranks(layout, 5, "cp-level-0", needs) == (4, 5)
    assert ranks(layout, 5, "cp-level-1", needs) == (1, 3, 5, 7)


def test_the_two_directions_of_a_pipeline_are_different_traffic() -> None:
    specs = groups_of(ParallelLayout(pp=2), 0, GroupNeeds())
    assert specs["pp-forward"].ranks == specs["pp-backward"].ranks == (0, 1)
    assert specs["pp-forward"].traffic != specs["pp-backward"].traffic


@st.composite
def needs_of(draw: st.DrawFn, layout: ParallelLayout) -> GroupNeeds:
    replicas = layout.dp * layout.cp
    divisors = [size for size in range(1, replicas + 1) if replicas % size == 0]
    needs = GroupNeeds(
        tied_embeddings=draw(st.booleans()),
        kv_heads=draw(st.sampled_from([size for size in range(1, layout.tp + 1) if layout.tp % size == 0])),
        split_rank=draw(st.none() | st.integers(1, layout.pp - 1)) if layout.pp > 1 else None,
        optimizer_instances=draw(st.sampled_from(divisors)),
        background_saving=draw(st.booleans()),
    )
    try:
        groups_of(layout, 0, needs)
    except ValueError:
        return GroupNeeds(tied_embeddings=needs.tied_embeddings)
    return needs


@settings(deadline=None, max_examples=40)
@given(layouts().filter(lambda layout: layout.world_size <= 256), st.data())
def test_all_members_see_the_same_group(layout: ParallelLayout, data: st.DataObject) -> None:
    """Whoever a rank waits for while a group is made waits for it, too, under the same name."""
    needs = data.draw(needs_of(layout))
    everyone = [groups_of(layout, rank, needs) for rank in range(layout.world_size)]
    for rank, specs in enumerate(everyone):
        for name, spec in specs.items():
            assert rank in spec.ranks
            assert list(spec.ranks) == sorted(set(spec.ranks))
            assert all(everyone[member][name] == spec for member in spec.ranks)


@settings(deadline=None, max_examples=40)
@given(layouts().filter(lambda layout: layout.world_size <= 256), st.data())
def test_the_groups_of_the_world_are_those_of_its_ranks(layout: ParallelLayout, data: st.DataObject) -> None:
    needs = data.draw(needs_of(layout))
    listed = list(all_groups(layout, needs))
    assert len(set(listed)) == len(listed)
    of_ranks = {spec for rank in range(layout.world_size) for spec in groups_of(layout, rank, needs).values()}
    assert set(listed) == {spec for spec in of_ranks if len(spec.ranks) > 1}
    names = list(groups_of(layout, 0, needs))  # the first rank has groups of all names
    assert [names.index(spec.name) for spec in listed] == sorted(names.index(spec.name) for spec in listed)


EXPERTS_APART = ParallelLayout(tp=2, dp=4, etp=1, ep=4, order="dp-tp-cp-ep-pp")
REFUSED: list[tuple[ParallelLayout, dict[str, Any], str]] = [
    (ParallelLayout(tp=4), {"kv_heads": 3}, "divisor of tp=4"),
    (ParallelLayout(tp=4, dp=2), {"kv_heads": 6}, "divisor of tp=4"),
    (ParallelLayout(tp=4), {"kv_heads": 0}, "divisor of tp=4"),
    (ParallelLayout(cp=8), {"cp_levels": (2, 2)}, "must be cp=8"),
    (ParallelLayout(dp=2), {"optimizer_instances": 3}, "dp x cp = 2"),
    (ParallelLayout(dp=6), {"optimizer_instances": 0}, "dp x cp = 6"),
    (ParallelLayout(tp=2, dp=8, etp=1, ep=8), {"optimizer_instances": 4}, "replicas of experts, 2"),
    (EXPERTS_APART, {"optimizer_instances": 2}, "deals dense layers and experts out"),
    (ParallelLayout(pp=4), {"split_rank": 4}, "a rank each of pp=4"),
    (ParallelLayout(pp=4), {"split_rank": 0}, "a rank each of pp=4"),
]


@pytest.mark.parametrize(("layout", "asked", "rule"), REFUSED)
def test_nobody_makes_groups_without_being_refused(layout: ParallelLayout, asked: dict[str, Any], rule: str) -> None:
    needs = GroupNeeds(**asked)
    with pytest.raises(ValueError, match=re.escape(rule)):
        groups_of(layout, 0, needs)
    with pytest.raises(ValueError, match=re.escape(rule)):
        all_groups(layout, needs)  # at the call: nothing is made before the refusal


def test_all_groups_of_sixteen_thousand_ranks_are_listed_in_a_second() -> None:
    layout = ParallelLayout(tp=8, cp=2, dp=64, pp=16, etp=1, ep=64)
    elapsed = []
    for _ in range(3):  # the best of three: other tests may share the machine
        begin = time.process_time()
        assert len(list(all_groups(layout, GroupNeeds(optimizer_instances=4)))) > 10_000
        elapsed.append(time.process_time() - begin)
    assert min(elapsed) < 1

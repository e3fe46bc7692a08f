"""The groups of a rank as records: who is in them, in which order they are made, what they may share."""

import time
from collections.abc import Sequence
from math import gcd

from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.layout.ranks import GroupNeeds, ParallelLayout, all_groups, groups_of
from tests.layout.test_ranks import layouts

CUBE = ParallelLayout(tp=2, cp=2, dp=2, pp=2, etp=1, ep=4)


def ranks(layout: ParallelLayout, rank: int, name: str, needs: GroupNeeds | None = None) -> Sequence[int]:
    return groups_of(layout, rank, needs or GroupNeeds())[name].ranks


def test_the_order_in_which_groups_are_made_is_fixed() -> None:
    assert list(groups_of(CUBE, 0, GroupNeeds())) == [
        *("dp-cp", "edp", "dp-cp-shard", "dp-cp-replicate", "edp-shard", "edp-replicate", "world", "kv-replicas"),
        *("tp", "cp-alltoall", "cp-ring", "tp-cp", "etp-ep", "pp-forward", "pp-backward", "saving", "word-embedding"),
    ]


def test_the_embedding_group_joins_first_and_last_stage_where_embeddings_are_tied() -> None:
    layout, tied = ParallelLayout(tp=2, pp=4), GroupNeeds(tied_embeddings=True)
    found = [ranks(layout, rank, "word-embedding", tied) for rank in range(8)]
    assert found == [(0, 6), (1, 7), (), (), (), (), (0, 6), (1, 7)]
    assert [ranks(layout, rank, "word-embedding") for rank in (0, 6)] == [(0,), ()]


def test_ranks_that_share_a_key_value_head_are_neighbours_along_tp() -> None:
    layout = ParallelLayout(tp=4, dp=2)
    assert [ranks(layout, rank, "kv-replicas", GroupNeeds(kv_heads=2)) for rank in (0, 3, 5)] == [
        (0, 1),
        (2, 3),
        (4, 5),
    ]
    assert ranks(layout, 6, "kv-replicas", GroupNeeds(kv_heads=1)) == (4, 5, 6, 7)
    assert ranks(layout, 0, "kv-replicas", GroupNeeds(kv_heads=4)) == (0,)
    assert ranks(layout, 0, "kv-replicas", GroupNeeds(kv_heads=8)) == (0,)


def test_optimizer_instances_are_slices_of_the_replicas() -> None:
    layout, needs = ParallelLayout(tp=2, dp=4, pp=2), GroupNeeds(optimizer_instances=2)
    assert ranks(layout, 0, "dp-cp") == (0, 2, 4, 6)
    assert ranks(layout, 0, "dp-cp-shard", needs) == (0, 2)
    assert ranks(layout, 4, "dp-cp-shard", needs) == (4, 6)
    assert ranks(layout, 0, "dp-cp-replicate", needs) == (0, 4)
    assert ranks(layout, 0, "dp-cp-shard") == ranks(layout, 0, "dp-cp-replicate") == ()
    experts = ParallelLayout(tp=2, dp=8, etp=1, ep=4)
    names = ("edp", "edp-shard", "edp-replicate")
    assert [ranks(experts, 1, name, needs) for name in names] == [(1, 5, 9, 13), (1, 5), (1, 9)]


def test_the_two_directions_of_a_pipeline_and_writing_behind_training_are_traffic_of_their_own() -> None:
    specs = groups_of(ParallelLayout(pp=2), 0, GroupNeeds(background_saving=True))
    assert specs["pp-forward"].ranks == specs["pp-backward"].ranks == (0, 1)
    assert specs["pp-forward"].traffic != specs["pp-backward"].traffic
    assert [name for name, spec in specs.items() if spec.traffic == specs["saving"].traffic] == ["saving"]
    assert ranks(ParallelLayout(dp=2), 0, "saving") == ()


@st.composite
def needs_of(draw: st.DrawFn, layout: ParallelLayout) -> GroupNeeds:
    copies = gcd(layout.dp * layout.cp, layout.sizes["edp"] if layout.has_experts else layout.dp * layout.cp)
    return GroupNeeds(
        tied_embeddings=draw(st.booleans()),
        kv_heads=draw(st.sampled_from([size for size in range(1, layout.tp + 1) if layout.tp % size == 0])),
        optimizer_instances=draw(st.sampled_from([size for size in range(1, copies + 1) if copies % size == 0])),
        background_saving=draw(st.booleans()),
    )


@settings(deadline=None)
@given(layouts().filter(lambda layout: layout.world_size <= 256), st.data())
def test_all_members_see_the_same_group_and_the_world_lists_it_once(
    layout: ParallelLayout, data: st.DataObject
) -> None:
    """Whoever a rank waits for while a group is made waits for it, too, under the same name."""
    needs = data.draw(needs_of(layout))
    everyone = [groups_of(layout, rank, needs) for rank in range(layout.world_size)]
    for rank, specs in enumerate(everyone):
        for name, spec in specs.items():
            assert rank in spec.ranks or not spec.ranks
            assert list(spec.ranks) == sorted(set(spec.ranks))
            assert all(everyone[member][name] == spec for member in spec.ranks)
    listed = list(all_groups(layout, needs))
    assert len(set(listed)) == len(listed)
    assert set(listed) == {spec for specs in everyone for spec in specs.values() if len(spec.ranks) > 1}
    names = list(everyone[0])  # the first rank has groups of all names
    assert [names.index(spec.name) for spec in listed] == sorted(names.index(spec.name) for spec in listed)


def test_all_groups_of_sixteen_thousand_ranks_are_listed_in_a_second() -> None:
    layout = ParallelLayout(tp=8, cp=2, dp=64, pp=16, etp=1, ep=64)
    elapsed = []
    for _ in range(3):  # the best of three: other tests may share the machine
        begin = time.process_time()
        assert len(list(all_groups(layout, GroupNeeds(optimizer_instances=4)))) > 5_000
        elapsed.append(time.process_time() - begin)
    assert min(elapsed) < 1


def test_the_ranks_of_a_sequence_are_a_ring_of_neighbours_that_swap_heads() -> None:
    layout, needs = ParallelLayout(tp=2, cp=4), GroupNeeds(context_ring=2)
    assert [ranks(layout, rank, "cp-alltoall", needs) for rank in (0, 3, 4)] == [(0, 2), (1, 3), (4, 6)]
    assert [ranks(layout, rank, "cp-ring", needs) for rank in (0, 3, 4)] == [(0, 4), (3, 7), (0, 4)]
    assert ranks(layout, 0, "cp-ring", GroupNeeds(context_ring=4)) == (0, 2, 4, 6)
    assert ranks(layout, 0, "tp-cp", needs) == ()  # no routers that count over them
    assert ranks(ParallelLayout(tp=2, cp=2, ep=4, etp=1), 0, "tp-cp") == (0, 1, 2, 3)

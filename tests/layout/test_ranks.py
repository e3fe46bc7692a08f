"""Rank arithmetic: the worked examples of Megatron-LM and its explainers number by number, and what always holds."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.layout.ranks import DENSE_AXES, EXPERT_AXES, ParallelLayout, strides_of


def pairs(distance: int, firsts: list[int]) -> list[list[int]]:
    return [[first, first + distance] for first in firsts]


def test_sixteen_ranks_tp2_pp4() -> None:
    """The example in the docstring of Megatron-LM's initialize_model_parallel."""
    layout = ParallelLayout(tp=2, dp=2, pp=4)
    assert layout.groups("dp") == pairs(2, [0, 1, 4, 5, 8, 9, 12, 13])
    assert layout.groups("tp") == pairs(1, [0, 2, 4, 6, 8, 10, 12, 14])
    assert layout.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_sixteen_ranks_with_context_parallelism_and_folded_experts() -> None:
    """tp2 cp2 dp2 pp2 over etp1 ep4 edp2, as megatron-core lays it out."""
    layout = ParallelLayout(tp=2, cp=2, dp=2, pp=2, etp=1, ep=4)
    assert layout.groups("cp") == pairs(2, [0, 1, 4, 5, 8, 9, 12, 13])
    assert layout.groups("dp-cp") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert layout.groups("tp-cp") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert layout.groups("tp-dp-cp") == [list(range(8)), list(range(8, 16))]
    assert layout.groups("tp-pp") == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert layout.groups("ep") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert layout.groups("edp") == pairs(4, [0, 1, 2, 3, 8, 9, 10, 11])
    assert layout.groups("etp-ep-pp") == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]


def test_an_axis_that_the_order_leaves_out_has_one_position() -> None:
    layout = ParallelLayout(tp=2, pp=2, order="tp-pp")
    assert layout.groups("dp") == [[0], [1], [2], [3]]
    assert layout.coordinates(3) == {"tp": 1, "pp": 1, "cp": 0, "dp": 0}


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    """Random layouts of up to 4,096 ranks in random orders; those with experts fold them over the same stages.

    Where an order would give the experts other pipelines, they are moved to its end: there the two always agree.
    """
    tp, cp, dp, pp = (draw(st.integers(1, 8)) for _ in range(4))
    order = "-".join(draw(st.permutations(["tp", "cp", "ep", "dp", "pp"])))
    if draw(st.booleans()):
        return ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
    rest = tp * cp * dp
    etp = draw(st.sampled_from([size for size in range(1, rest + 1) if rest % size == 0]))
    ep = draw(st.sampled_from([size for size in range(1, rest // etp + 1) if rest // etp % size == 0]))
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "etp": etp, "ep": ep, "edp": rest // etp // ep}
    dense, expert = (strides_of(order, sizes, axes)["pp"] for axes in (DENSE_AXES, EXPERT_AXES))
    if dense != expert:
        order = "-".join([*(axis for axis in order.split("-") if axis != "pp"), "pp"])
    return ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, order=order)


def axis_sets(layout: ParallelLayout) -> list[tuple[str, ...]]:
    """Every set of axes of either numbering."""
    numberings = [DENSE_AXES, EXPERT_AXES] if layout.has_experts else [DENSE_AXES]
    return [chosen for axes in numberings for count in range(1, 5) for chosen in combinations(axes, count)]


@settings(deadline=None)
@given(layouts(), st.data())
def test_the_groups_of_any_axes_partition_the_world_by_the_other_axes_and_ascend(
    layout: ParallelLayout, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    for axes in axis_sets(layout):
        name = "-".join(data.draw(st.permutations(axes)))
        groups = layout.groups(name)
        assert sorted(member for group in groups for member in group) == list(range(layout.world_size))
        assert all(group == sorted(group) for group in groups)
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)
        assert [layout.group_of(rank, name)] == [group for group in groups if rank in group]
        numbering = DENSE_AXES if {*axes} <= {*DENSE_AXES} else EXPERT_AXES
        for group in groups:
            others = {tuple(layout.coordinates(member)[axis] for axis in {*numbering} - {*axes}) for member in group}
            assert len(others) == 1


@settings(deadline=None)
@given(layouts())
def test_coordinates_are_a_bijection(layout: ParallelLayout) -> None:
    for axes in (DENSE_AXES, EXPERT_AXES) if layout.has_experts else (DENSE_AXES,):
        for rank in range(layout.world_size):
            at = layout.coordinates(rank)
            assert rank == sum(at[axis] * layout.strides[axis] for axis in axes)
            assert all(0 <= at[axis] < layout.sizes[axis] for axis in axes)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp": 0}, "tp=0"),
        ({"vpp": 0}, "vpp=0"),
        ({"dp": 2, "etp": 0}, "etp=0"),
        ({"dp": 4, "ep": 2}, "ep needs etp"),
        ({"dp": 6, "ep": 4, "etp": 1}, "experts do not fill"),
        (
            {"tp": 4, "dp": 2, "pp": 2, "ep": 2, "etp": 1, "order": "tp-cp-ep-pp-dp"},
            "4 ranks apart, those of experts 2",
        ),
    ],
)
def test_sizes_that_no_rule_would_have_let_through_are_our_own_mistake(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        ParallelLayout(**sizes)

"""A layout that cannot be is refused with everything that is wrong with it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.layout.flaws import Flaw
from megalite.layout.layout_rules import LayoutRequest, layout_flaws, layout_of
from megalite.layout.ranks import ParallelLayout


def problems(world_size: int, **sizes: Any) -> list[Flaw]:
    return layout_flaws(LayoutRequest(world_size, **sizes))


def test_what_is_left_of_the_world_is_data_parallel() -> None:
    assert layout_of(LayoutRequest(16, tp=4, pp=2)) == ParallelLayout(tp=4, pp=2, dp=2)
    layout = layout_of(LayoutRequest(16, tp=4, pp=2, ep=4, etp=1))
    assert (layout.dp, layout.edp) == (2, 2)


@pytest.mark.parametrize(("asked", "etp"), [({"ep": 2}, 2), ({"etp": 1}, 1), ({"experts": True}, 2), ({}, None)])
def test_ep_etp_or_experts_make_it_a_mixture_of_experts(asked: dict[str, Any], etp: int | None) -> None:
    layout = layout_of(LayoutRequest(8, tp=2, **asked))
    assert layout.etp == etp
    assert layout.has_experts == (etp is not None)


def test_dense_sizes_must_divide_the_world() -> None:
    (problem,) = problems(16, tp=3, pp=2)
    assert problem.rule == "not a multiple of tp=3 x cp=1 x pp=2 = 6"


def test_expert_sizes_must_divide_the_world() -> None:
    (problem,) = problems(16, tp=4, ep=3, etp=2)
    assert problem.rule == "not a multiple of etp=2 x ep=3 x pp=1 = 6, the ranks of one set of experts"


def test_dense_and_expert_sizes_are_refused_at_once() -> None:
    dense, expert = problems(16, tp=3, ep=5)
    assert "tp=3 x cp=1 x pp=1 = 3" in dense.rule
    assert "tp=3 x ep=5 x pp=1 = 15" in expert.rule


def test_a_world_larger_or_smaller_than_the_layout_is_refused() -> None:
    (larger,) = problems(16, tp=2, dp=4)
    assert larger.rule == "larger than the layout: tp=2 x cp=1 x pp=1 x dp=4 = 8"
    (smaller,) = problems(4, tp=2, dp=4)
    assert smaller.rule.startswith("smaller than the layout")


def test_an_order_names_known_axes_once() -> None:
    unknown, repeated = problems(8, order="tp-xp-dp-dp-pp")
    assert "'xp' is no axis" in unknown.rule
    assert repeated.rule == "names dp more than once"
    (empty,) = problems(1, order="")
    assert "'' is no axis" in empty.rule
    (expert_axis,) = problems(1, order="etp-dp-pp")
    assert "etp takes the place of tp" in expert_axis.rule


@pytest.mark.parametrize(
    ("order", "sizes", "axis"),
    [
        ("cp-ep-dp-pp", {"tp": 2}, "tp"),
        ("tp-ep-dp-pp", {"cp": 2}, "cp"),
        ("tp-cp-ep-pp", {}, "dp"),
        ("tp-dp-pp", {"tp": 2, "ep": 2}, "ep"),
        ("cp-ep-dp-pp", {"etp": 2}, "tp"),
        ("tp-cp-ep-dp", {"pp": 2}, "pp"),
    ],
)
def test_an_axis_above_one_must_have_its_place_in_the_order(order: str, sizes: dict[str, int], axis: str) -> None:
    found = problems(8, order=order, **sizes)
    assert found[0].rule.startswith(f"has no place for {axis}")
    assert found[0].fixes == ("order",)


def test_pipelines_of_dense_layers_and_experts_must_agree() -> None:
    (problem,) = problems(16, tp=2, cp=2, pp=2, ep=2, etp=1, order="tp-cp-ep-pp-dp")
    assert "4 ranks apart for dense layers (tp=2, cp=2), 2 for experts (etp=1, ep=2)" in problem.rule
    assert problems(16, tp=2, cp=2, pp=2, ep=4, etp=1, order="tp-cp-ep-pp-dp") == []


def test_a_dense_model_may_have_its_pipelines_anywhere() -> None:
    assert problems(16, tp=2, cp=2, pp=2, order="tp-cp-ep-pp-dp") == []


def test_virtual_stages_need_a_pipeline() -> None:
    (problem,) = problems(4, vpp=2)
    assert problem.field == "vpp"
    assert problems(4, vpp=2, pp=2) == []


def test_an_order_in_capitals_is_one_mistake() -> None:
    (problem,) = problems(8, tp=2, order="TP-CP-EP-DP-PP")
    assert problem.rule == "axes are written in lower case"


sizes = st.integers(1, 6)
requests = st.builds(
    LayoutRequest,
    world_size=st.integers(1, 64),
    tp=sizes,
    cp=sizes,
    dp=st.none() | sizes,
    pp=sizes,
    ep=sizes,
    etp=st.none() | sizes,
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]).map("-".join),
)


@settings(deadline=None)
@given(requests)
def test_what_is_accepted_is_a_layout_of_this_world(request: LayoutRequest) -> None:
    try:
        layout = layout_of(request)
    except ValueError:
        return
    assert layout.world_size == request.world_size
    if layout.expert is not None:
        assert layout.expert.world_size == request.world_size
        assert layout.expert.groups("pp") == layout.dense.groups("pp")

"""A layout that cannot be is refused with everything that is wrong with it, and the advice works."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.problems import Problem, UserError
from megalite.parallel.layout import ParallelLayout
from megalite.parallel.layout_rules import LayoutRequest, layout_of, layout_problems


def problems(world_size: Any, **sizes: Any) -> list[Problem]:
    return list(layout_problems(LayoutRequest(world_size, **sizes)))


def test_what_is_left_of_the_world_is_data_parallel() -> None:
    assert layout_of(LayoutRequest(16, tp=4, pp=2)) == ParallelLayout(tp=4, pp=2, dp=2)
    layout = layout_of(LayoutRequest(16, tp=4, pp=2, ep=4, etp=1))
    assert (layout.dp, layout.edp) == (2, 2)


@pytest.mark.parametrize(("asked", "etp"), [({"ep": 2}, 2), ({"etp": 1}, 1), ({"experts": True}, 2), ({}, None)])
def test_ep_etp_or_experts_make_it_a_mixture_of_experts(asked: dict[str, Any], etp: int | None) -> None:
    layout = layout_of(LayoutRequest(8, tp=2, **asked))
    assert layout.etp == etp
    assert layout.has_experts == (etp is not None)


@pytest.mark.parametrize("size", [0, -2, 1.5, "two", True, None])
def test_a_size_that_is_no_positive_whole_number_is_refused(size: Any) -> None:
    for axis in ("tp", "cp", "pp", "vpp", "ep", "world_size"):
        (problem,) = problems(**({"world_size": 8} | {axis: size}))
        assert (problem.setting, problem.value) == (axis, size)
        assert "at least 1" in problem.rule or "whole number" in problem.rule


def test_all_bad_sizes_and_a_bad_order_are_said_at_once() -> None:
    found = problems(0, tp=-1, ep="x", order="tp-zz")
    assert [problem.setting for problem in found] == ["world_size", "tp", "ep", "order"]


def test_dense_sizes_must_divide_the_world() -> None:
    (problem,) = problems(16, tp=3, pp=2)
    assert problem.rule == "not a multiple of tp=3 x cp=1 x pp=2 = 6"
    assert problem.remedy == "world_size=12 or 18, or tp=1 or 2 or 4"


def test_expert_sizes_must_divide_the_world() -> None:
    (problem,) = problems(16, tp=4, ep=3, etp=2)
    assert problem.rule == "not a multiple of etp=2 x ep=3 x pp=1 = 6, the ranks of one set of experts"
    assert problem.remedy == "world_size=12 or 24, or ep=1 or 2 or 4"


def test_dense_and_expert_sizes_are_refused_at_once() -> None:
    dense, expert = problems(16, tp=3, ep=5)
    assert "tp=3 x cp=1 x pp=1 = 3" in dense.rule
    assert "tp=3 x ep=5 x pp=1 = 15" in expert.rule
    assert dense.remedy.startswith("world_size=15 or 30")


def test_a_world_larger_or_smaller_than_the_layout_is_refused() -> None:
    (larger,) = problems(16, tp=2, dp=4)
    assert larger.rule == "larger than the layout: tp=2 x cp=1 x pp=1 x dp=4 = 8"
    assert larger.remedy == "world_size=8, or tp=4, or dp=8"
    (smaller,) = problems(4, tp=2, dp=4)
    assert smaller.rule.startswith("smaller than the layout")


def test_a_world_beyond_any_machine_is_refused_at_once() -> None:
    (problem,) = problems(10**30 + 1, tp=2)
    assert "sizes whose products divide it" in problem.remedy


def test_an_order_names_known_axes_once() -> None:
    unknown, repeated = problems(8, order="tp-xp-dp-dp-pp")
    assert "'xp' is no axis" in unknown.rule
    assert repeated.rule == "names dp more than once"
    (empty,) = problems(1, order="")
    assert "'' is no axis" in empty.rule
    (expert_axis,) = problems(1, order="etp-dp-pp")
    assert "etp takes the place of tp" in expert_axis.remedy
    (number,) = problems(1, order=5)
    assert number.rule.startswith("must be text")


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
    advised = found[0].remedy.removeprefix("order=")
    assert problems(8, order=advised, **sizes) == []


def test_pipelines_of_dense_layers_and_experts_must_agree() -> None:
    (problem,) = problems(16, tp=2, cp=2, pp=2, ep=2, etp=1, order="tp-cp-ep-pp-dp")
    assert "4 ranks apart for dense layers (tp=2, cp=2), 2 for experts (etp=1, ep=2)" in problem.rule
    assert problem.remedy.startswith("order=tp-cp-ep-dp-pp")
    assert problems(16, tp=2, cp=2, pp=2, ep=4, etp=1, order="tp-cp-ep-pp-dp") == []


def test_a_dense_model_may_have_its_pipelines_anywhere() -> None:
    assert problems(16, tp=2, cp=2, pp=2, order="tp-cp-ep-pp-dp") == []


def test_virtual_stages_need_a_pipeline() -> None:
    (problem,) = problems(4, vpp=2)
    assert problem.setting == "vpp"
    assert problems(4, vpp=2, pp=2) == []


def test_settings_are_named_as_the_user_knows_them() -> None:
    (problem,) = layout_problems(LayoutRequest(9, tp=2), lambda field: f"--{field.replace('_', '-')}")
    assert problem.setting == "--world-size"
    assert problem.remedy == "--world-size=8 or 10, or --tp=1 or 3 or 9"


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


@given(requests)
def test_what_is_accepted_is_a_layout_of_this_world(request: LayoutRequest) -> None:
    try:
        layout = layout_of(request)
    except UserError:
        return
    assert layout.world_size == request.world_size
    if layout.expert is not None:
        assert layout.expert.world_size == request.world_size
        assert layout.expert.groups("pp") == layout.dense.groups("pp")


@given(requests)
def test_every_size_that_is_advised_fits_the_world(request: LayoutRequest) -> None:
    for problem in layout_problems(request):
        if problem.setting != "world_size":
            continue
        assert re.search(r"=\d+|sizes whose products divide it", problem.remedy)
        for axis, values in re.findall(r"(\w+)=(\d+(?: or \d+)*)", problem.remedy):
            for value in values.split(" or "):
                changed = replace(request, **{axis: int(value)})
                assert [each.setting for each in layout_problems(changed) if each.setting == "world_size"] == []

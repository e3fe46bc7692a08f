"""A layout that cannot be is refused with everything that is wrong with it, and the advice works."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.problems import Problem, UserError
from megalite.parallel.layout import ParallelLayout
from megalite.parallel.layout_rules import LayoutRequest, layout_of, layout_problems, pipeline_sizes
from tests.parallel.following import ways_out


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
    assert problem.remedy == f"world_size={10**30} or {10**30 + 2}, or tp=1 or 61 or 101"


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


def test_two_sizes_are_advised_where_no_single_one_would_do() -> None:
    (problem,) = problems(16, tp=3, cp=5)
    assert problem.remedy == "world_size=15 or 30, or tp=2 with cp=4"
    dense, expert = problems(16, tp=3, dp=5, ep=2)
    assert dense.remedy == "tp=4 with dp=4"  # of 15 ranks, experts of 6 are no part
    assert expert.remedy == "tp=4 with dp=4"


def test_the_advice_for_a_bad_size_fits_the_world() -> None:
    (problem,) = problems(15, tp=0)
    assert problem.remedy == "tp=1 or 3 or 5"
    (problem,) = problems(16, tp="2", dp=8)
    assert problem.remedy == "tp=2"
    (problem,) = problems(0, tp=4)
    assert problem.remedy == "world_size=4"
    (problem,) = problems(4, vpp=2)
    assert problem.remedy == "vpp=1, or pp=2 or 4"
    (problem,) = problems(1, vpp=2)
    assert problem.remedy == "vpp=1"


def test_sound_sizes_are_judged_beside_bad_ones() -> None:
    bad, misfit = problems(16, tp=0, cp=3)
    assert (bad.setting, bad.remedy) == ("tp", "tp=1 or 2 or 4")
    assert misfit.rule == "not a multiple of cp=3 x pp=1 = 3"


def test_an_order_in_capitals_is_one_mistake() -> None:
    (problem,) = problems(8, tp=2, order="TP-CP-EP-DP-PP")
    assert (problem.rule, problem.remedy) == ("axes are written in lower case", "order=tp-cp-ep-dp-pp")


def test_no_size_is_advised_that_the_caller_does_not_accept() -> None:
    (problem,) = layout_problems(LayoutRequest(16, tp=3, pp=2), accepts=lambda changed: changed.tp != 2)
    assert problem.remedy == "world_size=12 or 18, or tp=1 or 4 or 8"


def test_pipelines_have_the_sizes_that_fit_the_world_beside_the_others() -> None:
    assert pipeline_sizes(LayoutRequest(16, tp=4)) == [1, 2, 4]
    assert pipeline_sizes(LayoutRequest(16, tp=4, pp=3)) == [1, 2, 4]
    assert pipeline_sizes(LayoutRequest(16, tp=4, order="tp-cp-ep-dp-pp-xp")) == [1, 2, 4]
    assert pipeline_sizes(LayoutRequest(16, tp=4, pp=0)) == [1, 2, 4]
    assert pipeline_sizes(LayoutRequest(16, pp=2, vpp=2)) == [1, 2, 4, 8, 16]
    assert pipeline_sizes(LayoutRequest(16, tp=4, ep=8, etp=1)) == [1, 2]


sizes = st.integers(1, 6)
perhaps = st.sampled_from([1, 1, 2, 3, 4, 6, 0, -1, "2", None])
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
anything = st.builds(
    LayoutRequest,
    world_size=st.integers(0, 64),
    tp=perhaps,
    cp=perhaps,
    dp=st.none() | perhaps,
    pp=perhaps,
    vpp=perhaps,
    ep=perhaps,
    etp=st.none() | perhaps,
    experts=st.booleans(),
    order=st.lists(st.sampled_from(["tp", "cp", "ep", "dp", "pp", "PP", "xp"]), max_size=6).map("-".join)
    | st.permutations(["tp", "cp", "ep", "dp", "pp"]).map("-".join),
)


@settings(deadline=None)
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


@settings(deadline=None, max_examples=100)
@given(requests | anything)
def test_following_a_remedy_removes_its_problem_and_adds_none(request: LayoutRequest) -> None:
    found = list(layout_problems(request))
    rules = Counter(map(identity, found))
    for problem in found:
        ways = ways_out(problem.remedy)
        assert ways, problem
        for way in ways:
            values: dict[str, Any] = {
                name: value if name == "order" else value and int(value) for name, value in way.items()
            }
            after = Counter(map(identity, layout_problems(replace(request, **values))))
            assert after < rules, (problem, way)
            assert after[identity(problem)] < rules[identity(problem)], (problem, way)


def identity(problem: Problem) -> tuple[str, str]:
    """The rule that is broken, whatever the sizes that it speaks of."""
    if problem.setting == "world_size" and "whole number" not in problem.rule:
        return problem.setting, "experts" if problem.rule.endswith("set of experts") else "dense layers"
    return problem.setting, re.sub(r", but .*|\d+", "", problem.rule)

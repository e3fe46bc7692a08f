"""The engine of remedies: every value that is advised is followed, and it mends its problem and makes none."""

import shlex
import time
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.case import Case
from megalite.config.parallel_rules import (
    PARALLEL_RULES,
    batch_splits_over_ranks,
    layers_split_over_stages,
    schedule_suits_the_pipeline,
    world_splits_into_the_layout,
)
from megalite.config.remedies import Rule, problems_of
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, with_values
from megalite.errors.problems import Problem
from tests.errors.following import ways_out

LABELS = {"world_size": "--world", "dp": "--dp", "split_rank": "--split"}
OWN = {label: name for name, label in LABELS.items()}
LAYOUT: tuple[Rule, ...] = (world_splits_into_the_layout,)
STAGES: tuple[Rule, ...] = (world_splits_into_the_layout, layers_split_over_stages)
SCHEDULE: tuple[Rule, ...] = (batch_splits_over_ranks, world_splits_into_the_layout, schedule_suits_the_pipeline)


def case_of(world_size: int, own: dict[str, Any] | None = None, **parallel: Any) -> Case:
    values = {name if "." in name else f"parallel.{name}": value for name, value in parallel.items()}
    return Case(with_values(Config(), values), world_size, labels=LABELS, **(own or {}))


def remedy(rules: tuple[Rule, ...], case: Case) -> str:
    (problem,) = problems_of(case, rules)
    return problem.remedy


@pytest.mark.parametrize(
    ("case", "advice"),
    [
        (case_of(16, tp=3, pp=2), "--world=12 or 18, or parallel.tp=1 or 2 or 4"),
        (case_of(16, {"dp": 4}, tp=2), "--world=8, or parallel.tp=4, or --dp=8, or leave --dp unset"),
        (case_of(16, tp=3, cp=5), "--world=15 or 30, or parallel.tp=2 with parallel.cp=4"),
        (case_of(10**30 + 1, tp=2), f"--world={10**30} or {10**30 + 2}, or parallel.tp=1 or 61 or 101"),
        (case_of(15, vpp=2), "parallel.vpp=1, or parallel.pp=3 or 5 or 15"),
        (case_of(8, tp=2, order="TP-CP-EP-DP-PP"), "parallel.order=tp-cp-ep-dp-pp"),
        (case_of(8, tp=2, order="cp-ep-dp-pp"), "parallel.order=cp-ep-dp-pp-tp"),
    ],
)
def test_a_layout_that_does_not_fill_the_world_is_told_which_would(case: Case, advice: str) -> None:
    assert remedy(LAYOUT, case) == advice


def test_what_is_advised_about_stages_suits_the_world() -> None:
    case = case_of(16, {"split_rank": 4}, pp=4, **{"model.num_layers": 12})
    assert remedy(STAGES, case) == "--split=1 or 2 or 3, or parallel.pp=8 or 16"


# --- properties ----------------------------------------------------------------------------------------------------

SMALL = st.integers(1, 6)
LAYOUTS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("parallel.tp", "parallel.cp", "parallel.pp", "parallel.ep"), SMALL),
    "parallel.vpp": st.sampled_from([1, 1, 2]),
    "parallel.etp": st.none() | SMALL,
    "parallel.order": st.permutations(["tp", "cp", "ep", "dp", "pp"]).map("-".join)
    | st.lists(st.sampled_from(["tp", "cp", "ep", "dp", "pp", "PP", "xp"]), min_size=1, max_size=6).map("-".join),
}
PLACES: dict[str, st.SearchStrategy[Any]] = {
    "model.num_layers": st.integers(1, 40),
    "parallel.pp": st.integers(1, 9),
    "parallel.vpp": st.integers(1, 4),
    "parallel.standalone_embedding": st.sampled_from([False, False, True]),
    "parallel.first_stage_layers": st.none() | st.integers(0, 12),
    "parallel.last_stage_layers": st.none() | st.integers(0, 12),
    "parallel.count_embedding": st.sampled_from([False, False, True]),
    "parallel.count_loss": st.sampled_from([False, False, True]),
    "parallel.pipeline_layout": st.none() | st.sampled_from(["Ett|tt|ttL", "Ett|m|L", "E(t|)*3L", "x"]),
}
SCHEDULES: dict[str, st.SearchStrategy[Any]] = {
    "parallel.schedule": st.none() | st.sampled_from(SETTINGS["parallel.schedule"].choices),
    "parallel.pp": st.integers(1, 9),
    "parallel.vpp": st.integers(1, 4),
    "parallel.microbatch_group_size": st.none() | st.integers(1, 20),
    "train.global_batch_size": st.integers(1, 40),
    "train.micro_batch_size": st.sampled_from([None, 1, 2]),
}


def check_remedies(case: Case, rules: tuple[Rule, ...]) -> None:
    """What is advised takes its problem away and adds none. Only what is wrong with the order shows no sooner than the
    sizes fill the world."""
    before = keys_of(case, rules)
    for problem in problems_of(case, rules):
        ways = ways_out(problem.remedy)
        assert ways, problem
        for way in ways:
            changed = case.changed({OWN.get(name, name): read(name, text) for name, text in way.items()})
            added = keys_of(changed, rules) - before
            assert {field for field, _ in added} <= {"parallel.order"}, (problem, way, added)
            assert rule_of(problem) not in map(rule_of, problems_of(changed, rules)), (problem, way)


def keys_of(case: Case, rules: tuple[Rule, ...]) -> set[tuple[str, str]]:
    return {flaw.key for rule in rules for flaw in rule(case)}


def read(name: str, text: str | None) -> Any:
    if text is None:
        return SETTINGS[name].default if name in SETTINGS else None
    return yaml.safe_load(*shlex.split(text))


def rule_of(problem: Problem) -> tuple[str, str]:
    return problem.setting, problem.rule


@settings(deadline=None, max_examples=60)
@given(st.fixed_dictionaries(LAYOUTS), st.integers(1, 64), st.none() | SMALL, st.booleans())
def test_following_a_remedy_of_a_layout(values: dict[str, Any], world: int, dp: int | None, experts: bool) -> None:
    check_remedies(Case(with_values(Config(), values), world, dp, experts, labels=LABELS), LAYOUT)


@settings(deadline=None, max_examples=60)
@given(st.fixed_dictionaries(PLACES), st.sampled_from([None, None, 1, 2, 5]))
def test_following_a_remedy_of_stages(values: dict[str, Any], split: int | None) -> None:
    case = Case(with_values(Config(), values), values["parallel.pp"], split_rank=split, labels=LABELS)
    check_remedies(case, STAGES)


@settings(deadline=None, max_examples=60)
@given(st.fixed_dictionaries(SCHEDULES), st.integers(1, 2))
def test_following_a_remedy_of_a_schedule(values: dict[str, Any], replicas: int) -> None:
    case = Case(with_values(Config(), values), replicas * values["parallel.pp"], labels=LABELS)
    check_remedies(case, SCHEDULE)


@pytest.mark.parametrize(
    ("values", "world", "advice"),
    [
        ({"parallel.vpp": 100}, 1, "parallel.vpp=1"),
        ({"parallel.tp": 7}, 7, "model.ffn_hidden_size=700 or 707"),
        ({"parallel.pp": 97, "parallel.vpp": 400}, 97, "parallel.pipeline_layout="),
    ],
)
def test_what_is_advised_is_near_and_allowed(values: dict[str, Any], world: int, advice: str) -> None:
    told = "; ".join(
        problem.remedy for problem in problems_of(Case(with_values(Config(), values), world), PARALLEL_RULES)
    )
    assert advice in told
    assert "38800" not in told, "more layers than model.num_layers allows"


def test_a_long_ramp_on_a_large_world_is_judged_at_once() -> None:
    config = with_values(Config(), {"train.batch_ramp": [8, 8, 100], "parallel.tp": 8, "parallel.pp": 3})
    begin = time.process_time()
    assert problems_of(Case(config, 720_720), PARALLEL_RULES)
    assert time.process_time() - begin < 10

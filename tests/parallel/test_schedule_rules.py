"""Sizes that are no schedule are refused, all at once, with values that work when they are tried."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.problems import Problem, UserError
from megalite.parallel.schedule_rules import Naming, ScheduleRequest, schedule_problems
from megalite.pipeline.schedules import SCHEDULES, build_schedule
from tests.parallel.following import ways_out

NAMES = Naming("parallel.schedule", "parallel.pp", "parallel.vpp", "train.global_batch_size", "parallel.group", 4)


def problem(request: ScheduleRequest, names: Naming = NAMES) -> Problem:
    (found,) = schedule_problems(request, names)
    return found


@pytest.mark.parametrize(
    ("request_", "setting", "value", "rule", "remedy"),
    [
        (
            ScheduleRequest("interleaved", 4, 8),
            "parallel.schedule",
            "interleaved",
            "goes to and fro between the chunks of a rank, and parallel.vpp=1 is one chunk",
            "parallel.vpp=2 or 3, or parallel.schedule=1f1b or zb-h1 or gpipe",
        ),
        (
            ScheduleRequest("zb-h1", 4, 8, vpp=2),
            "parallel.schedule",
            "zb-h1",
            "works on one chunk of layers for each rank, not on parallel.vpp=2",
            "parallel.schedule=interleaved, or parallel.vpp=1",
        ),
        (
            ScheduleRequest("interleaved", 4, 3, vpp=2),
            "train.global_batch_size",
            12,
            "makes 3 microbatches, and interleaved needs one for each of parallel.pp=4 ranks",
            "train.global_batch_size=16 or 20, or parallel.schedule=1f1b with parallel.vpp=1",
        ),
        (
            ScheduleRequest("interleaved", 4, 9, vpp=2, group_size=3),
            "parallel.group",
            3,
            "must be from parallel.pp=4 to 9, the number of microbatches",
            "parallel.group=5 or 9, or leave parallel.group unset",
        ),
        (
            ScheduleRequest("interleaved", 4, 9, vpp=2, group_size=4),
            "parallel.group",
            4,
            "leaves 1 of 9 microbatches for the last group, fewer than parallel.pp=4",
            "parallel.group=5 or 9, or leave parallel.group unset, or train.global_batch_size=32 or 48",
        ),
        (
            ScheduleRequest("interleaved", 4, 3, vpp=2, group_size=4),
            "train.global_batch_size",
            12,
            "makes 3 microbatches, and interleaved needs one for each of parallel.pp=4 ranks",
            "train.global_batch_size=16 or 32, "
            "or parallel.schedule=1f1b with parallel.vpp=1, and leave parallel.group unset",
        ),
        (
            ScheduleRequest("1f1b", 4, 8, group_size=4),
            "parallel.group",
            4,
            "has no effect with parallel.schedule=1f1b",
            "leave parallel.group unset",
        ),
        (
            ScheduleRequest("zbh1", 4, 8),
            "parallel.schedule",
            "zbh1",
            "unknown choice, zb-h1 is the nearest",
            "parallel.schedule=1f1b or zb-h1 or gpipe",
        ),
        (
            ScheduleRequest("interleaved", 1, 8, vpp=2),
            "parallel.vpp",
            2,
            "virtual stages divide the stages of a pipeline, and parallel.pp=1 has none",
            "parallel.pp=2 or 3 or 4, or parallel.schedule=1f1b with parallel.vpp=1",
        ),
        (
            ScheduleRequest("1f1b", 4, 0),
            "train.global_batch_size",
            0,
            "must be a whole number, at least 1",
            "train.global_batch_size=4 or 8",
        ),
    ],
)
def test_each_rule_names_what_works(
    request_: ScheduleRequest, setting: str, value: object, rule: str, remedy: str
) -> None:
    assert problem(request_) == Problem(setting, value, rule, remedy)


def test_all_problems_are_told_at_once() -> None:
    found = schedule_problems(ScheduleRequest("1f1b", 4, 8, vpp=2, group_size=4))
    assert [one.setting for one in found] == ["schedule", "group_size"]
    with pytest.raises(UserError, match="2 problems"):
        build_schedule(ScheduleRequest("1f1b", 4, 8, vpp=2, group_size=4))


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_other_schedules_take_fewer_microbatches_than_ranks(name: str, microbatches: int) -> None:
    assert not schedule_problems(ScheduleRequest(name, 4, microbatches))


def test_a_remedy_suits_what_else_is_said_about_the_sizes() -> None:
    request = ScheduleRequest("interleaved", 4, 8)
    (found,) = schedule_problems(request, accepts=lambda changed: changed.vpp != 2 and changed.schedule != "gpipe")
    assert found.remedy == "vpp=3 or 4, or schedule=1f1b or zb-h1"


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "schedule": st.sampled_from([*SCHEDULES, "interleaved", "zbv", None]),
    "pp": st.integers(0, 9) | st.just("4"),
    "microbatches": st.integers(0, 20),
    "vpp": st.integers(0, 4) | st.just(2.0),
    "group_size": st.none() | st.integers(0, 20) | st.just("x"),
}


@settings(deadline=None, max_examples=100)
@given(st.fixed_dictionaries(FIELDS))
def test_every_value_that_is_advised_removes_its_problem_and_adds_none(options: dict[str, Any]) -> None:
    found = schedule_problems(ScheduleRequest(**options))
    for one in found:
        ways = ways_out(one.remedy)
        assert ways, one
        for way in ways:
            changes = {name: None if value is None else _value(name, value) for name, value in way.items()}
            after = schedule_problems(ScheduleRequest(**options | changes))
            assert (one.setting, one.rule) not in {(other.setting, other.rule) for other in after}, (one, way)
            hides = "whole number" in one.rule or "unknown" in one.rule  # what else would be wrong with it
            assert len(after) < len(found) or hides, (one, way, after)


def _value(name: str, text: str) -> Any:
    return text if name == "schedule" else int(text)


def test_what_is_not_refused_is_built() -> None:
    for pp in range(1, 6):
        for microbatches in range(1, 12):
            for name in SCHEDULES:
                request = ScheduleRequest(name, pp, microbatches, vpp=3 if name == "interleaved" else 1)
                if not schedule_problems(request):
                    assert build_schedule(request).pp == pp

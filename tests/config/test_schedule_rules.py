"""Sizes that are no schedule are refused, all at once; what is not refused is built."""

import pytest

from megalite.config.schedule_rules import ScheduleRequest, schedule_flaws
from megalite.pipeline.schedules import SCHEDULES, build_schedule


@pytest.mark.parametrize(
    ("request_", "field", "rule"),
    [
        (ScheduleRequest("interleaved", 4, 8), "schedule", "goes to and fro between the chunks of a rank"),
        (ScheduleRequest("zb-h1", 4, 8, vpp=2), "schedule", "works on one chunk of layers"),
        (
            ScheduleRequest("interleaved", 4, 3, vpp=2),
            "microbatches",
            "makes 3 microbatches, and",
        ),
        (ScheduleRequest("interleaved", 4, 9, 2, group_size=3), "group_size", "must be from pp=4 to 9, the number of"),
        (
            ScheduleRequest("interleaved", 4, 9, 2, group_size=4),
            "group_size",
            "leaves 1 of 9 microbatches",
        ),
        (ScheduleRequest("1f1b", 4, 8, group_size=4), "group_size", "has no effect with schedule='1f1b'"),
        (ScheduleRequest("zbh1", 4, 8), "schedule", "is none of 1f1b, interleaved"),
        (ScheduleRequest("interleaved", 1, 8, vpp=2), "vpp", "virtual stages divide the stages of a pipeline"),
        (ScheduleRequest("1f1b", 4, 0), "microbatches", "must be a whole number, at least 1"),
    ],
)
def test_each_rule_says_what_is_wrong(request_: ScheduleRequest, field: str, rule: str) -> None:
    (flaw,) = schedule_flaws(request_)
    assert flaw.field == field
    assert flaw.rule.startswith(rule)


def test_all_flaws_are_told_at_once() -> None:
    found = schedule_flaws(ScheduleRequest("1f1b", 4, 8, vpp=2, group_size=4))
    assert [one.field for one in found] == ["schedule", "group_size"]
    with pytest.raises(ValueError, match=r"one chunk of layers .*; group_size"):
        build_schedule(ScheduleRequest("1f1b", 4, 8, vpp=2, group_size=4))


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_other_schedules_take_fewer_microbatches_than_ranks(name: str, microbatches: int) -> None:
    assert not schedule_flaws(ScheduleRequest(name, 4, microbatches))


def test_what_is_not_refused_is_built() -> None:
    for pp in range(1, 6):
        for microbatches in range(1, 12):
            for name in SCHEDULES:
                request = ScheduleRequest(name, pp, microbatches, vpp=3 if name == "interleaved" else 1)
                if not schedule_flaws(request):
                    assert build_schedule(request).pp == pp

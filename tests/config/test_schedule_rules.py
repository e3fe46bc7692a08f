"""Sizes that are no schedule are refused, all at once; what is not refused is built."""

import pytest

from megalite.config.schedule_rules import ScheduleRequest, schedule_flaws
from megalite.pipeline.schedules import SCHEDULES, build_schedule

SCHEDULE, BATCH, GROUP = "parallel.schedule", "train.global_batch_size", "parallel.microbatch_group_size"


@pytest.mark.parametrize(
    ("request_", "setting", "words"),
    [
        (ScheduleRequest("interleaved", 4, 8), SCHEDULE, "goes through several chunks of a rank, and parallel.vpp=1"),
        (ScheduleRequest("zb-h1", 4, 8, vpp=2), SCHEDULE, "works on one chunk of layers"),
        (ScheduleRequest("interleaved", 4, 3, vpp=2), BATCH, "for each of parallel.pp=4 ranks, and there are 3"),
        (
            ScheduleRequest("interleaved", 4, 9, 2, group_size=3),
            GROUP,
            "must be from parallel.pp=4 to 9",
        ),
        (ScheduleRequest("interleaved", 4, 9, 2, group_size=4), GROUP, "leaves 1 of 9 microbatches"),
        (ScheduleRequest("1f1b", 4, 8, group_size=4), GROUP, "has no effect with parallel.schedule=1f1b"),
    ],
)
def test_each_rule_says_what_is_wrong(request_: ScheduleRequest, setting: str, words: str) -> None:
    ((refused, rule),) = schedule_flaws(request_)
    assert refused == setting
    assert words in rule


def test_all_flaws_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"one chunk of layers .*; parallel.microbatch_group_size"):
        build_schedule(ScheduleRequest("1f1b", 4, 8, vpp=2, group_size=4))


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_other_schedules_take_fewer_microbatches_than_ranks(name: str, microbatches: int) -> None:
    assert not [*schedule_flaws(ScheduleRequest(name, 4, microbatches))]


def test_what_is_not_refused_is_built() -> None:
    for pp in range(1, 6):
        for microbatches in range(1, 12):
            for name in SCHEDULES:
                request = ScheduleRequest(name, pp, microbatches, vpp=3 if name == "interleaved" else 1)
                if not [*schedule_flaws(request)]:
                    assert build_schedule(request).pp == pp

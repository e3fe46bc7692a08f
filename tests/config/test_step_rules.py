"""Batches that do not grow as asked, and steps that are none of the run's, are refused with values that work."""

from typing import Any

import pytest

from megalite.config.derive import derive
from megalite.config.parallel_rules import schedule_request
from megalite.config.rules import check
from megalite.config.schema import Config
from megalite.config.settings import with_values
from megalite.config.step_plan import ramp_sizes
from megalite.pipeline.schedules import build_schedule
from tests.config.test_rules import problems_of
from tests.errors.following import ways_out

RAMP, SKIP, PROFILE, BATCH = (
    "train.batch_ramp",
    "train.skip_steps",
    "train.profile_steps",
    "train.global_batch_size",
)
INTERLEAVED = f"parallel.pp=4 parallel.vpp=2 model.num_layers=8 {BATCH}=32 train.micro_batch_size=1"
UNSET = "train.batch_ramp=null"

# Command line, world size, the setting that is named, words of the rule, and the remedy.
BROKEN = [
    (f"{RAMP}=[4]", 1, RAMP, "must be three whole numbers", f"{RAMP}=[4,1,800] or null"),
    (f"{RAMP}=[2,0,9]", 1, RAMP, "each at least 1", f"{RAMP}=[4,1,800] or null"),
    (f"{RAMP}=[8,1,90]", 1, RAMP, "must start below train.global_batch_size=8", f"{RAMP}=[4,1,800] or null"),
    (
        f"{RAMP}=[4,3,100]",
        1,
        RAMP,
        "steps of 3 do not lead from 4 to train.global_batch_size=8",
        f"{RAMP}=[4,1,800] or null",
    ),
    (
        f"{RAMP}=[2,2,100]",
        4,
        RAMP,
        "its batches of 2 sequences are not a multiple of the 4 data-parallel ranks",
        f"fix: {RAMP}=[4,4,800] or null",
    ),
    (
        f"{RAMP}=[4,2,100] {BATCH}=16 train.micro_batch_size=2",
        2,
        RAMP,
        "its batches of 6 sequences are not a multiple of train.micro_batch_size=2 x 2 data-parallel ranks = 4",
        f"{RAMP}=[8,4,1600] or null",
    ),
    (
        f"{INTERLEAVED} {RAMP}=[2,2,100]",
        4,
        RAMP,
        "its batches of 2 sequences make 2 microbatches: interleaved needs a microbatch for each",
        f"{RAMP}=[16,1,3200] or null",
    ),
    (
        f"{INTERLEAVED} parallel.microbatch_group_size=8 {RAMP}=[8,6,100]",
        4,
        RAMP,
        "make 26 microbatches: leaves 2 of 26 microbatches for the last group",
        f"fix: {UNSET}",
    ),
    (f"{RAMP}=[1,1,100] {BATCH}=2", 2, RAMP, "batches of 1 sequences", f"fix: {UNSET}"),  # there is no smaller one
    (
        f"{SKIP}=[3,11,12] train.steps=10",
        1,
        SKIP,
        "the steps of this run are 1 to train.steps=10, and 11 is not",
        f"{SKIP}=[3], or train.steps=12",
    ),
    (f"{SKIP}=[0,3]", 1, SKIP, "1 to train.steps=200, and 0 is not", f"fix: {SKIP}=[3]"),
    (f"{PROFILE}=[201]", 1, PROFILE, "201 is not", f"{PROFILE}=[], or train.steps=201"),
    (f"{PROFILE}=[3,4] {SKIP}=[4]", 1, PROFILE, "passes over step 4", f"fix: {PROFILE}=[3]"),
]


@pytest.mark.parametrize(
    ("line", "world_size", "name", "rule", "remedy"), BROKEN, ids=[f"{row[0]} on {row[1]}" for row in BROKEN]
)
def test_a_broken_rule_names_the_setting_and_what_would_work(
    line: str, world_size: int, name: str, rule: str, remedy: str
) -> None:
    (problem,) = problems_of(line, world_size)
    assert problem.setting == name
    assert rule in problem.rule, problem
    assert remedy in str(problem), problem


@pytest.mark.parametrize(("line", "world_size"), [row[:2] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_following_the_advice_helps(line: str, world_size: int) -> None:
    (problem,) = problems_of(line, world_size)
    ways = ways_out(problem.remedy)
    assert ways
    for way in ways:
        changes = " ".join(f"{name}={value or 'null'}" for name, value in way.items())
        assert problems_of(f"{line} {changes}", world_size) == [], changes


@pytest.mark.parametrize(
    ("settings", "world_size", "micro"),
    [
        ({RAMP: [4, 4, 100], BATCH: 16}, 1, 4),
        ({RAMP: [4, 6, 100], BATCH: 16}, 2, 1),
        ({RAMP: [8, 8, 100], BATCH: 32, "parallel.pp": 4}, 4, 2),
        ({RAMP: [16, 16, 100], BATCH: 32, "parallel.pp": 2, "parallel.vpp": 2}, 4, 2),
    ],
)
def test_a_micro_batch_size_that_nobody_sets_suits_every_batch(
    settings: dict[str, Any], world_size: int, micro: int
) -> None:
    config = with_values(Config(), settings)
    assert check(config, world_size) == []
    derived = derive(config, world_size)
    assert derived.train.micro_batch_size == micro
    assert check(derived, world_size) == []
    request = schedule_request(derived, world_size)
    sequences = derived.train.global_batch_size // request.microbatches
    for size in ramp_sizes(derived.train):
        assert size % sequences == 0
        build_schedule(schedule_request(with_values(derived, {RAMP: None, BATCH: size}), world_size))
    assert request.group_size is None, "each number of microbatches has a group of its own"


def test_a_batch_that_does_not_suit_the_ranks_is_told_once() -> None:
    """Not also as a flaw of the way to it."""
    assert [problem.setting for problem in problems_of(f"{BATCH}=10 {RAMP}=[4,2,100]", 4)] == [BATCH]

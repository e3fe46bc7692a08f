"""Stages and schedules that do not suit the rest are refused, with values that work when they are tried."""

import re
import shlex
from collections import Counter
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.case import Case
from megalite.config.compose import load_config
from megalite.config.derive import derive
from megalite.config.parallel_rules import PARALLEL_RULES, layers_split_over_stages, schedule_suits_the_pipeline
from megalite.config.remedies import problems_of as problems_of_case
from megalite.config.rules import check
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, with_values
from megalite.layout.groups import groups_of
from megalite.layout.ranks import ParallelLayout
from megalite.pipeline.schedules import SCHEDULES
from megalite.train.build import needs_of
from tests.config.test_rules import problems_of
from tests.errors.following import Way, ways_out

PIPELINE_RULES = (layers_split_over_stages, schedule_suits_the_pipeline)
EIGHT = "parallel.pp=4 parallel.vpp=2 model.num_layers=8"
SCHEDULE, LAYERS, BATCH = "parallel.schedule", "model.num_layers", "train.global_batch_size"

# Command line, world size, the setting that is named, words of the rule, and the remedy.
BROKEN = [
    (
        "parallel.pp=2 parallel.schedule=interleaved",
        2,
        SCHEDULE,
        "parallel.vpp=1 is one chunk",
        "parallel.vpp=2, or parallel.schedule=1f1b or zb-h1 or gpipe",  # 3 chunks do not divide 4 layers
    ),
    (
        f"{EIGHT} parallel.schedule=zb-h1",
        4,
        SCHEDULE,
        "one chunk of layers for each rank, not on parallel.vpp=2",
        "parallel.schedule=interleaved, or parallel.vpp=1",
    ),
    (
        f"{EIGHT} train.micro_batch_size=4",
        4,
        BATCH,
        "makes 2 microbatches, and interleaved needs one for each of parallel.pp=4 ranks",
        "train.micro_batch_size=1 or 2, or train.global_batch_size=16 or 20",
    ),
    (f"{EIGHT} {BATCH}=7", 8, BATCH, "the 2 data-parallel ranks", f"{BATCH}=8 or 10, or world size=4"),  # 6 are too few
    (f"{EIGHT} {BATCH}=3", 8, BATCH, "the 2 data-parallel ranks", f"{BATCH}=8 or 10"),  # too few for 4 processes, too
    (
        f"{EIGHT} {BATCH}=14 train.micro_batch_size=4",
        4,
        BATCH,
        "train.micro_batch_size=4 x 1 data-parallel ranks",
        f"{BATCH}=16 or 20, or train.micro_batch_size=1 or 2",  # 12 are too few
    ),
    (
        f"{EIGHT} {BATCH}=9 parallel.microbatch_group_size=4",
        4,
        "parallel.microbatch_group_size",
        "leaves 1 of 9 microbatches for the last group",
        f"parallel.microbatch_group_size=5 or 9, or leave parallel.microbatch_group_size unset, or {BATCH}=8 or 12",
    ),
    (
        "parallel.pp=4 parallel.microbatch_group_size=4",
        4,
        "parallel.microbatch_group_size",
        "no effect with parallel.schedule=1f1b",
        "leave parallel.microbatch_group_size unset",
    ),
    (
        "parallel.pp=2 parallel.schedule=interleaved train.compile=true",
        2,
        SCHEDULE,
        "parallel.vpp=1 is one chunk",
        "parallel.vpp=2, or parallel.schedule=1f1b or gpipe",  # zb-h1 is not compiled
    ),
    (
        "parallel.pp=4 parallel.schedule=zb-h1 train.compile=true",
        4,
        "train.compile",
        "cannot put their weight gradients off, as parallel.schedule=zb-h1",
        "train.compile=false, or parallel.schedule=1f1b or gpipe",
    ),
    (
        "parallel.pp=4 model.num_layers=6",
        4,
        LAYERS,
        "the 4 stages of parallel.pp=4: 2 would be left over",
        """model.num_layers=4 or 8, or parallel.pp=1 or 2, or parallel.pipeline_layout='"E(tt|)*2t|tL"'""",
    ),
    (
        "parallel.pp=4 model.num_layers=3",
        4,
        LAYERS,
        "a stage would be left empty",
        """model.num_layers=4 or 8, or parallel.pp=1, or parallel.pipeline_layout='"E(t|)*3L"'""",
    ),
    (
        "parallel.pp=4 model.num_layers=7 parallel.standalone_embedding=true",
        4,
        LAYERS,
        "the 3 other stages of parallel.pp=4: 1 would be left over",
        "model.num_layers=6 or 9, or parallel.pp=2",
    ),
    (
        "parallel.pp=4 model.num_layers=7 parallel.first_stage_layers=2",
        4,
        LAYERS,
        "with parallel.first_stage_layers=2 it leaves 5",
        "model.num_layers=5 or 8, or parallel.first_stage_layers=1 or 4, or parallel.pp=2",
    ),
    (
        "parallel.pp=4 model.num_layers=6 parallel.count_embedding=true",
        4,
        LAYERS,
        "it counts as 7",
        "model.num_layers=3 or 7, or parallel.pp=1",
    ),
    (
        "parallel.pp=2 model.num_layers=7 parallel.pipeline_layout=Ett|tt|tt|tL",
        2,
        "parallel.vpp",
        "has 4 stages, that is 2 on each rank of parallel.pp=2",
        """parallel.vpp=2, or parallel.pipeline_layout='"Et*4|t*3L"'""",
    ),
    (
        "parallel.pp=2 parallel.pipeline_layout=Ett|tt",
        2,
        "parallel.pipeline_layout",
        "the last stage must end with L",
        """parallel.pipeline_layout='"Ett|ttL"', or leave parallel.pipeline_layout unset""",
    ),
    (
        "parallel.pp=2 model.num_layers=4 parallel.pipeline_layout=Ett|ttL parallel.count_loss=true",
        2,
        "parallel.count_loss",
        "cannot be combined with parallel.pipeline_layout",
        "leave parallel.count_loss unset",
    ),
    (
        "parallel.first_stage_layers=1",
        2,
        "parallel.first_stage_layers",
        "parallel.pp=1 is one rank",
        "leave parallel.first_stage_layers unset, or parallel.pp=2",
    ),
    (
        "parallel.vpp=2",
        2,
        "parallel.vpp",
        "virtual stages divide the stages of a pipeline",
        "parallel.vpp=1, or parallel.pp=2",
    ),
]


@pytest.mark.parametrize(
    ("line", "world_size", "name", "rule", "remedy"), BROKEN, ids=[f"{row[0]} on {row[1]}" for row in BROKEN]
)
def test_a_broken_rule_names_the_setting_and_what_would_work(
    line: str, world_size: int, name: str, rule: str, remedy: str
) -> None:
    (problem,) = problems_of(line, world_size)
    assert problem.setting == name
    assert rule in problem.rule
    assert problem.remedy == remedy


@pytest.mark.parametrize(
    "line",
    [
        "parallel.pp=4",
        "parallel.pp=4 parallel.schedule=gpipe train.global_batch_size=3 train.micro_batch_size=1",
        "parallel.pp=4 parallel.schedule=zb-h1 train.compile=false",
        f"{EIGHT} train.global_batch_size=9",
        f"{EIGHT} parallel.microbatch_group_size=8",
        "parallel.pp=4 model.num_layers=6 parallel.count_embedding=true parallel.count_loss=true",
        "parallel.pp=4 model.num_layers=6 parallel.standalone_embedding=true",
        "parallel.pp=4 parallel.vpp=2 model.num_layers=12 parallel.standalone_embedding=true",
        "parallel.pp=4 model.num_layers=7 parallel.first_stage_layers=1",
        "parallel.pp=4 model.num_layers=6 parallel.first_stage_layers=0 parallel.last_stage_layers=2",
        "parallel.pp=4 model.num_layers=5 parallel.pipeline_layout=E|tt||t*3L",
    ],
)
def test_uneven_stages_and_every_schedule_are_accepted_and_so_is_the_config_of_such_a_run(line: str) -> None:
    config = _config(line)
    assert check(config, 4) == check(derive(config, 4), 4) == []


def test_a_layout_comes_from_a_command_line_as_it_is_advised() -> None:
    (problem,) = problems_of("parallel.pp=4 model.num_layers=6", 4)
    advised = re.findall(r"parallel.pipeline_layout=\S+", problem.remedy)
    words = shlex.split(f"parallel.pp=4 model.num_layers=6 {advised[0]}")
    assert load_config(words, 4).parallel.pipeline_layout == "E(tt|)*2t|tL"


def test_all_that_is_wrong_with_a_pipeline_is_said_at_once() -> None:
    line = (
        "parallel.pp=4 parallel.vpp=2 parallel.schedule=zb-h1 parallel.microbatch_group_size=3 train.compile=true "
        "parallel.count_loss=true parallel.first_stage_layers=3"
    )
    assert [(one.setting, one.rule.split()[0]) for one in problems_of(line, 4)] == [
        ("parallel.count_loss", "cannot"),
        ("parallel.schedule", "works"),
        ("parallel.microbatch_group_size", "has"),
        ("train.compile", "compiled"),
    ]


def test_the_schedules_that_can_be_asked_for_are_those_that_there_are() -> None:
    assert SETTINGS["parallel.schedule"].choices == tuple(SCHEDULES)


@pytest.mark.parametrize("tied", [True, False])
def test_the_last_stage_sums_the_gradient_of_a_tied_embedding_with_the_first(tied: bool) -> None:
    needs = needs_of(with_values(Config(), {"model.tie_embeddings": tied}))
    groups = [groups_of(ParallelLayout(pp=4, dp=2), rank, needs) for rank in range(8)]
    found = {rank: one["embedding"].ranks for rank, one in enumerate(groups) if "embedding" in one}
    assert found == ({0: (0, 6), 6: (0, 6), 1: (1, 7), 7: (1, 7)} if tied else {0: (0,), 1: (1,)})


@st.composite
def _pipelines(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Settings that a pipeline reads, most of them at odds with each other, and a world."""
    pp = draw(st.integers(1, 6))
    values: dict[str, Any] = {
        "parallel.pp": pp,
        "parallel.vpp": draw(st.integers(1, 3)),
        "parallel.schedule": draw(st.sampled_from([None, None, *SCHEDULES])),
        "parallel.microbatch_group_size": draw(st.sampled_from([None, None, 1, 4, 6])),
        "parallel.first_stage_layers": draw(st.sampled_from([None, None, None, 0, 1, 2])),
        "parallel.last_stage_layers": draw(st.sampled_from([None, None, None, 0, 1, 2])),
        "parallel.count_embedding": draw(st.sampled_from([False, False, True])),
        "parallel.count_loss": draw(st.sampled_from([False, False, True])),
        "parallel.standalone_embedding": draw(st.sampled_from([False, False, False, True])),
        "parallel.pipeline_layout": draw(st.sampled_from([None, None, None, "Ett|ttL", "Et|t|tL", "E|tt||ttL", "x"])),
        "model.num_layers": draw(st.integers(1, 12)),
        "train.global_batch_size": draw(st.sampled_from([3, 8, 9, 24, 60])),
        "train.micro_batch_size": draw(st.sampled_from([None, None, 1, 4])),
        "train.compile": draw(st.sampled_from([None, True])),
    }
    return values, draw(st.sampled_from([pp, pp, 2 * pp, 12]))


@settings(max_examples=80, deadline=None)
@given(_pipelines())
def test_advice_about_a_pipeline_mends_its_problem(case: tuple[dict[str, Any], int]) -> None:
    """What is advised for the only problem leaves none; beside others it takes its own away."""
    values, world_size = case
    config = with_values(Config(), values)
    problems = check(config, world_size)
    told = problems_of_case(Case(config, world_size), PIPELINE_RULES, also=PARALLEL_RULES)
    for problem in told:
        assert problem in problems
        ways = [_values(way) for way in ways_out(problem.remedy)]
        assert ways, problem
        for way in ways:
            after = check(with_values(config, way), world_size)
            if len(problems) == 1:
                assert not after, (problem, way)
            same = Counter((one.setting, one.rule) for one in after)
            assert not same[problem.setting, problem.rule], (problem, way)


def _values(way: Way) -> dict[str, Any]:
    """What a shell and Hydra make of it."""
    return {
        name: SETTINGS[name].default if text is None else yaml.safe_load(*shlex.split(text))
        for name, text in way.items()
    }


def _config(line: str) -> Config:
    words = dict(word.split("=", 1) for word in line.split())
    return with_values(Config(), {name: yaml.safe_load(value) for name, value in words.items()})

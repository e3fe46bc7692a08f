"""Stages and schedules that do not suit the rest are refused, with values that work when they are tried."""

import re
import shlex

import pytest
import yaml  # type: ignore[import-untyped]

from megalite.config.compose import load_config
from megalite.config.derive import derive
from megalite.config.rules import check
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, with_values
from megalite.layout.groups import groups_of
from megalite.layout.ranks import ParallelLayout
from megalite.pipeline.schedules import SCHEDULES
from megalite.train.build import needs_of
from tests.config.test_rules import problems_of

EIGHT = "parallel.pp=4 parallel.vpp=2 model.num_layers=8"
SCHEDULE, LAYERS, BATCH = "parallel.schedule", "model.num_layers", "train.global_batch_size"
GROUP, LAYOUT = "parallel.microbatch_group_size", "parallel.pipeline_layout"

# Command line, world size, the setting that is named, and words of the message.
BROKEN = [
    ("parallel.pp=2 parallel.schedule=interleaved", 2, SCHEDULE, ["parallel.vpp=1 is one chunk", "parallel.vpp=2"]),
    (f"{EIGHT} parallel.schedule=zb-h1", 4, SCHEDULE, ["one chunk of layers for each rank", "=interleaved, or"]),
    (f"{EIGHT} train.micro_batch_size=4", 4, BATCH, ["needs a microbatch for each of parallel.pp=4", "there are 2"]),
    (f"{EIGHT} {BATCH}=7", 8, BATCH, ["the 2 data-parallel ranks", f"{BATCH}=8 or 10 or 12, or world size=4"]),
    (f"{EIGHT} {BATCH}=3", 8, BATCH, ["the 2 data-parallel ranks", f"fix: {BATCH}=8 or 10 or 12"]),  # enough for pp
    (f"{EIGHT} {BATCH}=14 train.micro_batch_size=4", 4, BATCH, ["=4 x 1 data-parallel ranks", f"{BATCH}=16 or 20"]),
    (
        f"{EIGHT} {BATCH}=9 {GROUP}=4",
        4,
        GROUP,
        ["leaves 1 of 9 microbatches", f"{GROUP}=5 or 9 or null"],
    ),
    (f"parallel.pp=4 {GROUP}=4", 4, GROUP, ["no effect with parallel.schedule=1f1b", f"fix: {GROUP}=null"]),
    (
        "parallel.pp=2 parallel.schedule=interleaved train.compile=true",
        *(2, SCHEDULE, ["is one chunk", "parallel.schedule=1f1b or gpipe, or"]),  # zb-h1 is not compiled
    ),
    (
        "parallel.pp=4 parallel.schedule=zb-h1 train.compile=true",
        *(
            4,
            "train.compile",
            ["as parallel.schedule=zb-h1", "train.compile=false, or parallel.schedule=1f1b or"],
        ),
    ),
    (
        f"parallel.pp=4 {LAYERS}=6",
        *(4, LAYERS, ["6 layers cannot be divided over 4 stages", f"{LAYERS}=4 or 8 or", "parallel.pp=1 or 2", LAYOUT]),
    ),
    (f"parallel.pp=4 {LAYERS}=3", 4, LAYERS, ["over 4 stages (parallel.pp=4)", "=4 or 8"]),
    (
        f"parallel.pp=4 {LAYERS}=7 parallel.standalone_embedding=true",
        *(
            4,
            LAYERS,
            ["7 layers cannot be divided over 3", "parallel.standalone_embedding=true", "=3 or 6 or 9"],
        ),
    ),
    (
        f"parallel.pp=4 {LAYERS}=7 parallel.first_stage_layers=2",
        *(4, LAYERS, ["5 layers cannot be divided over 3", "parallel.first_stage_layers=1 or 4", f"{LAYERS}=5 or 8"]),
    ),
    (f"parallel.pp=4 {LAYERS}=6 parallel.count_embedding=true", 4, LAYERS, ["7 layers cannot", f"{LAYERS}=3 or 7"]),
    (
        f"parallel.pp=2 {LAYERS}=7 {LAYOUT}=Ett|tt|tt|tL",
        *(2, LAYOUT, ["places 7 layers on 4 stages, not 7 on 2 (parallel.pp=2)", "parallel.vpp=2"]),
    ),
    (f"parallel.pp=2 {LAYOUT}=Ett|tt", 2, LAYOUT, ["E, the embedding, first", f"{LAYOUT}='\"Ett|ttL\"' or null"]),
    (
        f"parallel.pp=2 {LAYERS}=4 {LAYOUT}=Ett|ttL parallel.count_loss=true",
        *(2, "parallel.count_loss", [f"cannot be combined with {LAYOUT}", "fix: parallel.count_loss=false"]),
    ),
    ("parallel.first_stage_layers=1", 2, LAYERS, ["over 0 stages", "parallel.first_stage_layers=4 or null, or"]),
    (
        "parallel.vpp=2",
        2,
        "parallel.vpp",
        ["virtual stages divide", "fix: parallel.vpp=1, or parallel.pp=2"],
    ),
]


@pytest.mark.parametrize(
    ("line", "world_size", "name", "words"), BROKEN, ids=[f"{row[0]} on {row[1]}" for row in BROKEN]
)
def test_a_broken_rule_names_the_setting_and_what_would_work(
    line: str, world_size: int, name: str, words: list[str]
) -> None:
    (problem,) = problems_of(line, world_size)
    assert problem.setting == name
    assert all(word in str(problem) for word in words), str(problem)


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
        ("parallel.schedule", "zb-h1"),
        ("parallel.microbatch_group_size", "has"),
        ("train.compile", "compiled"),
    ]


@pytest.mark.parametrize(
    "other", ["parallel.count_embedding=true", "parallel.standalone_embedding=true", "parallel.pipeline_layout=Ett|ttL"]
)
def test_a_stage_without_layers_is_asked_for_too(other: str) -> None:
    (problem, *_) = problems_of(f"parallel.pp=2 {other} parallel.first_stage_layers=0", 2)
    assert "parallel.first_stage_layers" in problem.setting + problem.rule


def test_the_schedules_that_can_be_asked_for_are_those_that_there_are() -> None:
    assert SETTINGS["parallel.schedule"].choices == tuple(SCHEDULES)


@pytest.mark.parametrize("tied", [True, False])
def test_the_last_stage_sums_the_gradient_of_a_tied_embedding_with_the_first(tied: bool) -> None:
    needs = needs_of(with_values(Config(), {"model.tie_embeddings": tied}))
    groups = [groups_of(ParallelLayout(pp=4, dp=2), rank, needs) for rank in range(8)]
    found = {rank: one["word-embedding"].ranks for rank, one in enumerate(groups) if one["word-embedding"].ranks}
    assert found == ({0: (0, 6), 6: (0, 6), 1: (1, 7), 7: (1, 7)} if tied else {0: (0,), 1: (1,)})


def _config(line: str) -> Config:
    words = dict(word.split("=", 1) for word in line.split())
    return with_values(Config(), {name: yaml.safe_load(value) for name, value in words.items()})

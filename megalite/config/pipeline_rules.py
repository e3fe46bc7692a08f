"""The rules of a pipeline: who holds which layers, and in which order its passes go; rules.py says what a rule is.

The rules themselves are in `megalite.parallel`; here they get the user's names for what they read, and the judgement
of the whole config, on which values of a remedy are tried.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megalite.config.advice import either
from megalite.config.parallel_rules import (
    COMPILED,
    SCHEDULE_NAMES,
    STAGE_NAMES,
    layout_request,
    micro_batch_sizes,
    misfits,
    schedule_request,
    stage_settings,
)
from megalite.config.problems import Problem
from megalite.config.schema import Config
from megalite.config.settings import with_values
from megalite.parallel.layout_rules import pipeline_sizes
from megalite.parallel.schedule_rules import ScheduleRequest, schedule_problems
from megalite.parallel.stage_rules import StageSettings, stage_problems


def layers_split_over_stages(config: Config, world_size: int) -> Iterator[Problem]:
    def suits(changed: StageSettings) -> bool:
        values = {name: getattr(changed, field) for field, name in STAGE_NAMES.items()}
        return _others(with_values(config, values), world_size) <= before

    before = _others(config, world_size)
    sizes = pipeline_sizes(layout_request(config, world_size))
    for problem in stage_problems(stage_settings(config), STAGE_NAMES, sizes, suits):
        if not _told_by_the_layout(config, problem):
            yield replace(problem, remedy=_in_quotes(problem.remedy))


def schedule_suits_the_pipeline(config: Config, world_size: int) -> Iterator[Problem]:
    request, sequences = schedule_request(config, world_size)
    names = replace(SCHEDULE_NAMES, sequences=sequences or 1)

    def suits(changed: ScheduleRequest) -> bool:
        asked = {field: getattr(changed, field) for field in ("schedule", "pp", "vpp", "microbatches", "group_size")}
        values: dict[str, Any] = {
            getattr(names, field): names.shown(field, value)
            for field, value in asked.items()
            if value != getattr(request, field)
        }
        after = misfits(with_values(config, values), world_size)
        mended = any(rule.startswith("schedule") for rule, _ in before - after)  # the batch derives other sizes, too
        return mended and after <= before

    before = misfits(config, world_size)
    for problem in schedule_problems(request, names, suits):
        if _told_by_the_layout(config, problem):
            continue
        smaller: list[int] = []
        if problem.setting == names.microbatches and config.train.micro_batch_size is not None:
            smaller = micro_batch_sizes(config, world_size)
        remedy = f"train.micro_batch_size={either(smaller)}, or " if smaller else ""
        yield replace(problem, remedy=remedy + problem.remedy)


def weight_gradients_can_wait(config: Config, world_size: int) -> Iterator[Problem]:
    if COMPILED in misfits(config, world_size):
        rule = "compiled blocks cannot put their weight gradients off, as parallel.schedule=zb-h1 does"
        yield Problem("train.compile", True, rule, "train.compile=false, or parallel.schedule=1f1b")


def _others(config: Config, world_size: int) -> frozenset[tuple[str, str]]:
    """The misfits that are not about stages."""
    return frozenset(one for one in misfits(config, world_size) if not one[0].startswith("stages"))


def _told_by_the_layout(config: Config, problem: Problem) -> bool:
    """That one rank is no pipeline, and so has no virtual stages, is a rule of all layouts."""
    return config.parallel.pp == 1 and problem.setting == "parallel.vpp"


def _in_quotes(remedy: str) -> str:
    """A layout as it is pasted into a shell: its quotes are for the shell, and Hydra needs some, too."""
    return re.sub(r"(parallel\.pipeline_layout=)'([^']*)'", r"""\1'"\2"'""", remedy)


PIPELINE_RULES = (layers_split_over_stages, schedule_suits_the_pipeline, weight_gradients_can_wait)

"""Hints: every value that is offered is followed, and it mends its problem and makes none."""

import re
import time
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.rule import Case, Rule, broken, problems_of
from megalite.config.rules import LAYOUT_RULES, RULES, STAGE_RULES
from megalite.config.schema import Config
from megalite.config.settings import with_values

LABELS = {"world_size": "--world", "split_rank": "--split"}
OWN = {label: name for name, label in LABELS.items()}
RANKS: tuple[Rule, ...] = (*LAYOUT_RULES, *STAGE_RULES)


def case_of(world_size: int, values: dict[str, Any], **own: Any) -> Case:
    return Case(with_values(Config(), values), world_size, labels=LABELS, **own)


def follow(case: Case, rules: tuple[Rule, ...]) -> int:
    """Follows all that is offered: the setting keeps every rule then, and no other is newly refused. How often."""
    refused, followed = {names[0] for names, _ in broken(case, rules)}, 0
    for problem in problems_of(case, rules):
        for way in problem.hint.split(", or "):
            if assigned := re.fullmatch(r"([\w.-]+)=(.+)", way):
                name = OWN.get(assigned[1], assigned[1])
                for text in assigned[2].split(" or "):
                    changed = case.changed(name, yaml.safe_load(text))
                    after = {names[0] for names, _ in broken(changed, rules)}
                    assert after <= refused - {OWN.get(problem.setting, problem.setting)}, (problem, way)
                    followed += 1
    return followed


@pytest.mark.parametrize(
    ("case", "hint"),
    [
        (case_of(16, {"parallel.tp": 3, "parallel.pp": 2}), "--world=12 or 18 or 24, or parallel.tp=1 or 2 or 4"),
        (case_of(16, {"parallel.tp": 3, "parallel.cp": 5}), "--world=15 or 30 or 45"),
        (case_of(10**30 + 1, {"parallel.tp": 2}), f"--world={10**30 - 2} or {10**30} or"),
        (case_of(15, {"parallel.vpp": 2}), "parallel.vpp=1, or parallel.pp=3 or 5 or 15"),
        (case_of(8, {"parallel.tp": 2, "parallel.order": "cp-ep-dp-pp"}), "parallel.order=tp-cp-ep-dp-pp"),
        (case_of(16, {"parallel.pp": 4, "model.num_layers": 12}, split_rank=4), "--split=1 or 2 or 3"),
    ],
)
def test_what_does_not_fill_the_world_is_told_which_would(case: Case, hint: str) -> None:
    (problem,) = problems_of(case, LAYOUT_RULES + (STAGE_RULES if case.split_rank else ()))
    assert hint in problem.hint


SMALL, FEW = st.integers(1, 6), st.sampled_from([None, None, 0, 1, 2, 6])
AXES: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("parallel.tp", "parallel.pp"), SMALL),
    "parallel.vpp": st.sampled_from([1, 1, 2, 3]),
    "parallel.order": st.permutations(["tp", "cp", "ep", "dp", "pp"]).map("-".join)
    | st.sampled_from(["tp-cp-ep-dp-pp", "PP-dp", "tp-xp", "dp-dp"]),
}
EXPERTS: dict[str, st.SearchStrategy[Any]] = {"parallel.cp": SMALL, "parallel.ep": SMALL, "parallel.etp": SMALL}
STAGES: dict[str, st.SearchStrategy[Any]] = {
    "model.num_layers": st.integers(1, 40),
    "parallel.standalone_embedding": st.sampled_from([False, False, True]),
    "parallel.first_stage_layers": FEW,
    "parallel.last_stage_layers": FEW,
    "parallel.count_embedding": st.sampled_from([False, False, True]),
    "parallel.count_loss": st.sampled_from([False, False, True]),
    "parallel.pipeline_layout": st.sampled_from([None, None, "Ett|tt|ttL", "Ett|m|L", "E(t|)*3L", "x", "{1}"]),
}


@settings(deadline=None)
@given(st.fixed_dictionaries(AXES | EXPERTS | STAGES), st.integers(1, 24), st.sampled_from([None, None, 1, 2, 5]))
def test_following_a_hint_about_ranks(values: dict[str, Any], world: int, split: int | None) -> None:
    follow(case_of(world, values, split_rank=split), RANKS)


@pytest.mark.parametrize(
    ("values", "world"),
    [
        ({"parallel.tp": 1 << 20, "parallel.pp": 1 << 20, "parallel.vpp": 1 << 20}, 1 << 20),
        ({"parallel.tp": 8, "parallel.pp": 3, "train.batch_ramp": [8, 8, 100]}, 720_720),
        ({"parallel.tp": 7, "parallel.pp": 11, "parallel.vpp": 5, "train.global_batch_size": 13}, 10**6),
        ({"parallel.pp": 97, "parallel.vpp": 400, "model.num_layers": 10_000}, 97),
        ({"parallel.first_stage_layers": 9_999, "parallel.pp": 1 << 19, "optimizer.instances": 3}, 1 << 20),
    ],
)
def test_a_world_of_a_million_ranks_is_refused_at_once(values: dict[str, Any], world: int) -> None:
    begin = time.process_time()
    follow(case_of(world, values), RULES)
    assert time.process_time() - begin < 3

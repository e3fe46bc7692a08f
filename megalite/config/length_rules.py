"""Rules on how long a run is, and on what lies within it: warm-up, decay, steps that are passed over or profiled.

Where model or data decide how many steps there are, `LENGTH_RULES` judge again once they are known (plan/horizon.py).
"""

from collections.abc import Iterator
from math import inf

from megalite.config.rule import SHAPES, Case, Found, Rule
from megalite.config.schema import MOST_STEPS
from megalite.config.settings import SETTINGS
from megalite.config.step_plan import FOLLOW_LENGTH, HORIZONS, IN_TOKENS, horizon_of, warmup_and_decay


def warms_up(case: Case) -> bool:
    """Whether the schedule has a warm-up and a least rate: all have but a table."""
    return bool(case.config.lr.schedule != "table")


def steps_are_steps_of_the_run(case: Case) -> Iterator[Found]:
    train, lr = case.config.train, case.config.lr
    idle, steps, horizon = {*train.profile_steps} & {*train.skip_steps}, case.value("train.steps"), horizon_of(train)
    warmup, decay = (one or 0 for one in warmup_and_decay(case.config, steps or 0))
    by = [IN_TOKENS[name] if case.given(IN_TOKENS[name]) is not None else name for name in FOLLOW_LENGTH[1:3]]
    known = inf if steps is None else steps  # unknown: judged again once model and data are known
    last = "{1}" if horizon == "train.steps" or steps is None else f"{known}, the steps of {{1}}"
    late = lr.schedule == "wsd" and warmup <= known < warmup + decay
    bare = lr.schedule == "table" and not lr.table
    yield bare, "lr.table lr.schedule", f"must be given with {{1}}, like {SHAPES['lr.table'][1]}"
    yield warms_up(case) and warmup > known, f"{by[0]} {horizon} {known}", f"above {last}"
    yield late, f"{by[1]} {by[0]} {horizon}", "with {1} it is longer than the run, {2}"
    for name, listed in (("skip_steps", train.skip_steps), ("profile_steps", train.profile_steps)):
        beyond = [step for step in listed if not 1 <= step <= known]
        rule = f"must be from 1 to {last}, and {beyond} are not"
        yield beyond, f"{name} {horizon} {max(listed, default=1)}", rule
    yield idle, "profile_steps skip_steps", "{1} passes over some of them: there is nothing to record"


def a_run_has_one_length(case: Case) -> Iterator[Found]:
    first, *others = [name for name in HORIZONS if case.given(name) is not None] or ["train.steps"]
    for other in others:
        yield True, f"{other} {first}", "contradicts {1}: one of them says how long the run is"
    for one, other in IN_TOKENS.items():
        both = case.given(other) is not None and case.given(one) != SETTINGS[one].default
        yield both, f"{other} {one}", "contradicts {1}: one of them says it, in tokens or steps"
    steps = case.value("train.steps") or 0
    rule = f"takes {steps:,} steps, more than {MOST_STEPS:,}"
    yield steps > MOST_STEPS, f"{first} global_batch_size seq_length", rule


LENGTH_RULES: tuple[Rule, ...] = (steps_are_steps_of_the_run,)

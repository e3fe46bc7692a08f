"""The rules of single steps: how many sequences each takes, which are passed over, which are profiled; rules.py says
what a rule is."""

from collections.abc import Iterator
from itertools import islice, zip_longest

from megalite.config.parallel_rules import data_parallel_size, ramp_misfit
from megalite.config.problems import Problem
from megalite.config.schema import Config
from megalite.config.settings import value_of, with_values, yaml_value
from megalite.parallel.layout_rules import divisors

TRIED = 64  # first sizes around the one given, of which each is tried as a remedy
OFFERED = 2
STEPS_BY_NUMBER = ("train.skip_steps", "train.profile_steps")


def batches_grow_to_the_full_size(config: Config, world_size: int) -> Iterator[Problem]:
    if rule := ramp_misfit(config, world_size):
        ways = [f"train.batch_ramp={yaml_value(ramp)}" for ramp in islice(_ramps(config, world_size), OFFERED)]
        remedy = ", or ".join([*ways, "leave train.batch_ramp unset"])
        yield Problem("train.batch_ramp", config.train.batch_ramp, rule, remedy)


def listed_steps_are_steps_of_the_run(config: Config, world_size: int) -> Iterator[Problem]:
    steps = config.train.steps
    for name in STEPS_BY_NUMBER:
        listed: list[int] = value_of(config, name)
        others = [step for step in listed if not 1 <= step <= steps]
        if not others:
            continue
        ways = [f"{name}={yaml_value([step for step in listed if step not in others])}"]
        if min(listed) >= 1:
            ways.append(f"train.steps={max(listed)} or more")
        told = " and ".join(map(str, others[:3])) + (" and more" if len(others) > 3 else "")
        rule = f"the steps of this run are 1 to train.steps={steps}, and {told} {'are' if others[1:] else 'is'} not"
        yield Problem(name, listed, rule, ", or ".join(ways))


def profiled_steps_train(config: Config, world_size: int) -> Iterator[Problem]:
    profiled, skipped = config.train.profile_steps, config.train.skip_steps
    if idle := [step for step in profiled if step in skipped]:
        remedy = f"train.profile_steps={yaml_value([step for step in profiled if step not in idle])}"
        rule = f"train.skip_steps passes over step {idle[0]}: there is nothing to record"
        yield Problem("train.profile_steps", profiled, rule, remedy)


def _ramps(config: Config, world_size: int) -> Iterator[list[int]]:
    """Values of train.batch_ramp that suit the layout, the nearest to the one given first."""
    train, full = config.train, config.train.global_batch_size
    usual = (full // 2, full // 2, 100 * full)
    numbers = zip_longest(train.batch_ramp or [], usual)
    start, increment, samples = [asked if asked and asked > 0 else other for asked, other in islice(numbers, 3)]
    unit = (train.micro_batch_size or 1) * (data_parallel_size(config, world_size) or 1)
    starts = sorted(range(unit, full, unit), key=lambda first: abs(first - start))[:TRIED]
    tried = [(first, step) for first in starts for step in divisors(full - first) if step % unit == 0]
    for first, step in sorted(tried, key=lambda pair: (abs(pair[0] - start) + abs(pair[1] - increment), pair)):
        ramp = [first, step, samples]
        if ramp_misfit(with_values(config, {"train.batch_ramp": ramp}), world_size) is None:
            yield ramp


STEP_RULES = (batches_grow_to_the_full_size, listed_steps_are_steps_of_the_run, profiled_steps_train)

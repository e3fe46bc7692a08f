"""The rules of single steps: which are passed over, which are profiled; rules.py says what a rule is."""

from collections.abc import Iterator

from megalite.config.schema import Config
from megalite.config.settings import value_of, yaml_value
from megalite.errors.problems import Problem

STEPS_BY_NUMBER = ("train.skip_steps", "train.profile_steps")


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


STEP_RULES = (listed_steps_are_steps_of_the_run, profiled_steps_train)

"""The rules that join the optimizer's settings and train.fp8 with the precision and each other; remedies.py says what
a rule is.

A precision of auto is judged twice: here for what no device could do, and at the start, where the device has chosen.
"""

from collections.abc import Iterator
from ctypes import c_float
from typing import Any

from megalite.config.bounds import outside
from megalite.config.device_rules import precision_clashes
from megalite.config.remedies import Case, Flaw
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, yaml_value

ONLY_BF16 = ("optimizer.gradient_dtype", "train.fp8")


def numbers_are_held_as_asked(case: Case) -> Iterator[Flaw]:
    optimizer, betas = case.config.optimizer, case.config.optimizer.betas
    if len(betas) != 2:
        yield Flaw("optimizer.betas", "must be two numbers", {"optimizer.betas": [[0.9, 0.95]]})
    if (optimizer.gradient_dtype, optimizer.communication_dtype) == ("bf16", "fp32"):
        rule = "with optimizer.gradient_dtype=bf16 it sends twice the bytes of sums that are rounded already"
        fixes: dict[str, list[Any]] = {"optimizer.communication_dtype": [None], "optimizer.gradient_dtype": ["fp32"]}
        yield Flaw("optimizer.communication_dtype", rule, fixes)
    if case.config.precision != "auto":
        yield from _precision_flaws(case.config)
    if optimizer.moment_dtype == "bf16" and betas and 1 - 2**-8 <= betas[0] < 1:  # half an ulp of bf16: at most 2^-8
        rule = f"with optimizer.betas={yaml_value(betas)} a step takes less of the first moment than bf16 rounds away"
        yield Flaw("optimizer.moment_dtype", rule, {"optimizer.moment_dtype": ["fp32"]}, "a first beta of 0.99")


def _precision_flaws(config: Config) -> Iterator[Flaw]:
    for name, rule in precision_clashes(config, config.precision):
        precision = "fp32" if config.precision == "fp64" and name not in ONLY_BF16 else "bf16"
        yield Flaw(name, rule, {name: [SETTINGS[name].default], "precision": [precision]})


def loss_scale_starts_above_its_least(case: Case) -> Iterator[Flaw]:
    least, first = case.config.optimizer.min_loss_scale, case.config.optimizer.initial_loss_scale
    if case.config.precision == "fp16" and least > first:
        fixes = {"optimizer.min_loss_scale": [first], "optimizer.initial_loss_scale": [least]}
        rule = f"above where the scale starts, optimizer.initial_loss_scale={yaml_value(first)}"
        yield Flaw("optimizer.min_loss_scale", rule, fixes)


def fp32_holds_the_numbers(case: Case) -> Iterator[Flaw]:
    """What is no number, nothing, or out of bounds once it is rounded. Shares of data are counted exactly."""
    for setting in SETTINGS.values():
        if setting.kind not in (float, list[float]) or setting.group == "data" or case.config.precision == "fp64":
            continue
        value = case.value(setting.name)
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            held = c_float(one).value
            if (one and not held) or outside(setting, held):
                rule = f"fp32 holds it as {held:g}, and the precision is {case.config.precision}"
                yield Flaw(setting.name, rule, {setting.name: [setting.default], "precision": ["fp64"]})
                break


OPTIMIZER_RULES = (numbers_are_held_as_asked, loss_scale_starts_above_its_least, fp32_holds_the_numbers)

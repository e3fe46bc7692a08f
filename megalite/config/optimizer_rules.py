"""The rules that join the optimizer's settings with the precision and the ranks; rules.py says what a rule is.

A precision of auto is judged twice: here for what no device could do, and at the start, where the device has chosen.
"""

from collections.abc import Iterator

from megalite.config.case import Case
from megalite.config.parallel_rules import instances_split_the_replicas
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, value_of, with_values, yaml_value
from megalite.errors.problems import Problem

LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def sharding_has_an_effect(config: Config, world_size: int) -> Iterator[Problem]:
    if config.optimizer.zero:
        return
    sharded = with_values(config, {"optimizer.zero": 1})
    fits = not any(instances_split_the_replicas(Case(sharded, world_size)))
    for name in ("optimizer.instances", "optimizer.ownership"):
        if (value := value_of(config, name)) != SETTINGS[name].default:
            rule = "has no effect with optimizer.zero=0: every rank holds all of the optimizer's state"
            yield Problem(name, value, rule, f"{'optimizer.zero=1, or ' if fits else ''}leave it out")


def gradients_travel_no_wider_than_they_are_summed(config: Config, world_size: int) -> Iterator[Problem]:
    optimizer = config.optimizer
    if (optimizer.gradient_dtype, optimizer.communication_dtype) == ("bf16", "fp32"):
        yield Problem(
            "optimizer.communication_dtype",
            "fp32",
            "with optimizer.gradient_dtype=bf16 it sends twice the bytes of sums that are rounded already",
            "leave it out, or optimizer.gradient_dtype=fp32",
        )


def precision_suits_the_optimizer(config: Config, world_size: int) -> Iterator[Problem]:
    if config.precision != "auto":
        yield from precision_problems(config, config.precision)


def precision_problems(config: Config, precision: str) -> Iterator[Problem]:
    """Types that do not go with the precision that the run gets (fp64, fp32, bf16 or fp16)."""
    here = f"precision={precision}" if config.precision == precision else f"precision=auto, which is {precision} here"
    if config.optimizer.gradient_dtype == "bf16" and precision != "bf16":
        rule = f"only with precision=bf16 are gradients bf16, and this is {here}"
        remedy = "optimizer.gradient_dtype=fp32, or precision=bf16"
        yield Problem("optimizer.gradient_dtype", "bf16", rule, remedy)
    for name in ("optimizer.communication_dtype", "optimizer.moment_dtype"):
        if precision == "fp64" and value_of(config, name) == "bf16":
            rule = f"with {here} everything is fp64"
            yield Problem(name, "bf16", rule, f"{name}={yaml_value(SETTINGS[name].default)}, or precision=fp32")


def a_rounded_first_moment_decays(config: Config, world_size: int) -> Iterator[Problem]:
    """A step must take more of it than bf16 rounds away: half an ulp, at most 2^-8 of the value."""
    betas = config.optimizer.betas
    if config.optimizer.moment_dtype == "bf16" and betas and 1 - 2**-8 <= betas[0] < 1:
        rule = (
            f"with optimizer.betas={yaml_value(betas)} a step would take less of the first moment than bf16 rounds away"
        )
        yield Problem("optimizer.moment_dtype", "bf16", rule, "optimizer.moment_dtype=fp32, or a first beta of 0.99")


def loss_scale_has_an_effect(config: Config, world_size: int) -> Iterator[Problem]:
    if config.precision == "fp16":
        return
    never = ", and auto is never fp16" if config.precision == "auto" else ""
    for name in (f"optimizer.{each}" for each in LOSS_SCALE):
        value = value_of(config, name)
        if value != SETTINGS[name].default:
            rule = f"has no effect with precision={config.precision}: the loss is scaled in fp16 alone{never}"
            yield Problem(name, value, rule, "precision=fp16, or leave it out")


def loss_scale_starts_above_its_least(config: Config, world_size: int) -> Iterator[Problem]:
    least, first = config.optimizer.min_loss_scale, config.optimizer.initial_loss_scale
    if config.precision == "fp16" and least > first:
        yield Problem(
            "optimizer.min_loss_scale",
            least,
            f"above where the scale starts, optimizer.initial_loss_scale={yaml_value(first)}",
            f"optimizer.min_loss_scale={yaml_value(first)}, or optimizer.initial_loss_scale={yaml_value(least)}",
        )


OPTIMIZER_RULES = (
    sharding_has_an_effect,
    gradients_travel_no_wider_than_they_are_summed,
    precision_suits_the_optimizer,
    a_rounded_first_moment_decays,
    loss_scale_has_an_effect,
    loss_scale_starts_above_its_least,
)

"""Settings of the optimizer that do not go with the precision, the ranks or each other: refused with what works."""

import re
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megalite.config.derive import derive
from megalite.config.rules import check
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, with_values
from megalite.data.blend import Blend, integer_weights
from megalite.train.device_settings import precision_problems
from tests.config.refusal import refusal, settings
from tests.config.test_rules import problems_of

# Command line, world size, the setting that is named (its group: optimizer), and words of the message.
BROKEN = [
    ("optimizer.zero=0 optimizer.instances=2", 2, "instances", ["no effect", "optimizer.zero=1"]),
    ("optimizer.zero=0 optimizer.ownership=whole", 2, "ownership", ["no effect", "optimizer.zero=1"]),
    ("optimizer.instances=2", 1, "instances", ["dp x cp = 1", "optimizer.instances=1"]),
    ("optimizer.instances=3", 4, "instances", ["dp x cp = 4", "optimizer.instances=1 or 2 or 4"]),
    ("optimizer.instances=4 parallel.tp=2", 4, "instances", ["dp x cp = 2", "optimizer.instances=1 or 2"]),
    ("optimizer.gradient_dtype=bf16 precision=fp32", 1, "gradient_dtype", ["precision=fp32", "precision=bf16"]),
    ("optimizer.gradient_dtype=bf16 precision=fp16", 1, "gradient_dtype", ["precision=fp16", "precision=bf16"]),
    ("optimizer.gradient_dtype=bf16 precision=fp64", 1, "gradient_dtype", ["precision=fp64", "precision=bf16"]),
    (
        "optimizer.gradient_dtype=bf16 optimizer.communication_dtype=fp32 precision=bf16",
        1,
        "communication_dtype",
        ["twice the bytes", "optimizer.gradient_dtype=fp32"],
    ),
    (
        "optimizer.communication_dtype=bf16 precision=fp64",
        1,
        "communication_dtype",
        ["everything is fp64", "optimizer.communication_dtype=null, or precision=fp32"],
    ),
    ("optimizer.moment_dtype=bf16 precision=fp64", 1, "moment_dtype", ["fp64", "optimizer.moment_dtype=fp32"]),
    (
        "optimizer.moment_dtype=bf16 optimizer.betas=[0.999,0.999]",
        1,
        "moment_dtype",
        ["[0.999,0.999]", "optimizer.moment_dtype=fp32, or a first beta of 0.99"],
    ),
    ("optimizer.initial_loss_scale=2", 1, "initial_loss_scale", ["no effect with precision=auto", "fp16 alone"]),
    ("optimizer.min_loss_scale=2 precision=bf16", 1, "min_loss_scale", ["no effect with precision=bf16"]),
    ("optimizer.loss_scale_window=2 precision=fp32", 1, "loss_scale_window", ["no effect", "precision=fp16"]),
    ("optimizer.hysteresis=1 precision=fp64", 1, "hysteresis", ["no effect", "precision=fp16"]),
    (
        "optimizer.min_loss_scale=131072 precision=fp16",
        1,
        "min_loss_scale",
        ["optimizer.initial_loss_scale=65536.0", "=65536.0, or optimizer.initial_loss_scale=131072"],
    ),
    (
        "optimizer.initial_loss_scale=0.5 precision=fp16",
        1,
        "min_loss_scale",
        ["optimizer.min_loss_scale=0.5, or optimizer.initial_loss_scale=1.0"],
    ),
]


@pytest.mark.parametrize(
    ("line", "world_size", "name", "words"), BROKEN, ids=[f"{row[0]} on {row[1]}" for row in BROKEN]
)
def test_a_broken_rule_names_the_setting_and_what_would_work(
    line: str, world_size: int, name: str, words: list[str]
) -> None:
    (problem,) = problems_of(line, world_size)
    assert problem.setting == f"optimizer.{name}"
    assert all(word in str(problem) for word in words), str(problem)
    ways = re.findall(r"([a-z_.]+)=([\w.]+(?: or \w+)*)", problem.remedy)
    for advised, values in ways:
        for value in values.split(" or "):
            assert problems_of(f"{line} {advised}={value}", world_size) == []
    assert ways


FINE = [
    ("optimizer.gradient_dtype=bf16 precision=bf16", 1),
    ("optimizer.gradient_dtype=bf16 precision=auto", 1),
    ("optimizer.communication_dtype=bf16 optimizer.moment_dtype=bf16 precision=fp32", 1),
    ("optimizer.communication_dtype=bf16 optimizer.moment_dtype=bf16 precision=fp16", 1),
    ("optimizer.moment_dtype=bf16 optimizer.betas=[0.99,0.9999]", 1),
    ("optimizer.communication_dtype=fp32 precision=fp64", 1),
    ("optimizer.ownership=whole optimizer.instances=2 optimizer.bucket_size=1 optimizer.overlap=false", 4),
    ("optimizer.initial_loss_scale=1 optimizer.min_loss_scale=1 optimizer.hysteresis=1 precision=fp16", 1),
    ("optimizer.zero=0 optimizer.overlap=false optimizer.bucket_size=1000000", 4),
]


@pytest.mark.parametrize(("line", "world_size"), FINE)
def test_what_goes_together_is_accepted(line: str, world_size: int) -> None:
    assert problems_of(line, world_size) == []


def test_everything_that_is_wrong_is_told_at_once() -> None:
    line = (
        "optimizer.instances=3 optimizer.gradient_dtype=bf16 optimizer.communication_dtype=fp32 "
        "optimizer.moment_dtype=bf16 optimizer.min_loss_scale=2 optimizer.hysteresis=7 precision=fp64"
    )
    told = ["instances", "communication_dtype", "gradient_dtype", "moment_dtype", "min_loss_scale", "hysteresis"]
    assert settings(refusal(*line.split(), world_size=4)) == [f"optimizer.{name}" for name in told]


def test_sharding_is_not_advised_where_the_instances_would_not_fit() -> None:
    (problem,) = problems_of("optimizer.zero=0 optimizer.instances=3", 2)
    assert (problem.setting, problem.remedy) == ("optimizer.instances", "optimizer.instances=1")


def test_instances_are_not_judged_where_the_layout_is_wrong() -> None:
    assert settings(refusal("optimizer.instances=3", "parallel.tp=4", world_size=6)) == ["world size"]
    assert settings(refusal("optimizer.instances=3", "parallel.tp=two", world_size=4)) == ["parallel.tp"]


def test_a_refused_precision_is_not_judged_again() -> None:
    assert settings(refusal("precision=fp8", "optimizer.hysteresis=3")) == ["precision"]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16"])
def test_auto_is_judged_by_what_the_device_makes_of_it(precision: str) -> None:
    for setting in ({"optimizer.gradient_dtype": "bf16"}, {"train.fp8": "rowwise"}):
        config = with_values(Config(), setting)
        (problem,) = precision_problems(config, precision)
        assert problem.setting in setting
        assert f"precision=auto, which is {precision} here" in problem.rule
        assert not list(precision_problems(config, "bf16"))


optimizers = st.fixed_dictionaries(
    {
        "precision": st.sampled_from(["auto", "fp64", "fp32", "bf16", "fp16"]),
        "optimizer.zero": st.sampled_from([0, 1]),
        "optimizer.instances": st.integers(1, 6),
        "optimizer.ownership": st.sampled_from(["even", "whole"]),
        "optimizer.gradient_dtype": st.sampled_from(["fp32", "bf16"]),
        "optimizer.communication_dtype": st.sampled_from([None, "fp32", "bf16"]),
        "optimizer.moment_dtype": st.sampled_from(["fp32", "bf16"]),
        "optimizer.initial_loss_scale": st.sampled_from([65536.0, 2.0, 0.5]),
        "optimizer.min_loss_scale": st.sampled_from([1.0, 2.0]),
        "optimizer.hysteresis": st.sampled_from([1, 2]),
    }
)


@hypothesis_settings(max_examples=200, deadline=None)
@given(optimizers, st.sampled_from([1, 2, 3, 4, 6]))
def test_a_config_that_is_accepted_is_accepted_once_derived(values: dict[str, Any], world_size: int) -> None:
    config = with_values(Config(), values | {"train.global_batch_size": 12})
    if not check(config, world_size):
        assert check(derive(config, world_size), world_size) == []


FLOATS = [name for name, one in SETTINGS.items() if one.kind in (float, list[float]) and one.group != "data"]


@pytest.mark.parametrize("name", FLOATS)
def test_what_fp32_cannot_hold_is_refused_but_in_fp64(name: str) -> None:
    """numpy says what fp32 holds."""
    for number in (1e39, 1e-46, 1 - 1e-9, 1.1, 3e-38):
        value = f"[{number!r},0.5]" if SETTINGS[name].kind == list[float] else repr(number)
        with np.errstate(all="ignore"):
            held = float(np.float32(number))
        limits = SETTINGS[name].limits
        lost = not np.isfinite(held) or held == 0 or ("below" in limits and held >= limits["below"])
        of_itself = bool(problems_of(f"precision=fp64 {name}={value}", 1))  # out of bounds, without effect
        for precision in ("auto", "bf16", "fp16"):
            rules = [problem.rule for problem in problems_of(f"precision={precision} {name}={value}", 1)]
            told = any(rule.startswith("fp32 holds it as") for rule in rules)
            assert told == (
                lost and not any(rule.startswith(("must be at", "must be above", "must be below")) for rule in rules)
            ), (number, precision, rules)
        assert of_itself or not any("fp32" in one.rule for one in problems_of(f"precision=fp64 {name}={value}", 1))


def test_an_eps_that_is_nothing_in_fp32_is_refused_before_it_divides() -> None:
    (problem,) = refusal("optimizer.eps=1e-60").problems
    assert problem.remedy == "optimizer.eps=1.0e-8, or precision=fp64"
    for word in ("optimizer.eps=1.0e-8", "precision=fp64", "optimizer.eps=1e-45"):
        assert not problems_of(f"optimizer.eps=1e-60 {word}", 1)


@pytest.mark.parametrize("precision", ["auto", "fp64"])
def test_shares_that_no_number_holds_together_are_refused(precision: str) -> None:
    line = f"data.source=text data.path=[a,b] precision={precision} data.weights="
    for shares in ("[1.0e+308,1.0e-308]", "[1.0e+308,1]", "[1,1.0e-13]"):
        assert [problem.setting for problem in problems_of(line + shares, 1)] == ["data.weights"]
    for shares in ("[1.0e+308,1.0e+308]", "[1,1.0e-12]", "[1.0e-300,2.0e-300]"):
        assert problems_of(line + shares, 1) == []
        counts = Blend(integer_weights(yaml.safe_load(shares))).counts(3)
        assert sum(counts) == 3

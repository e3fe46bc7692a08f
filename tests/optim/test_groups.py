"""optimizer.groups: torch's param_groups for AdamW, the definition with other numbers for Muon, and what is refused."""

from typing import Any

import pytest
import torch

from megalite.config.groups import flaws_of_groups
from megalite.config.schema import Config, MuonConfig
from megalite.launch.context import CPU, ParallelContext
from megalite.optim.buffers import TrainingBuffers
from megalite.optim.groups import lines_of_groups, parameters_of_groups, problems_of_groups
from megalite.optim.optimizer import make_optimizer
from megalite.optim.rank_buffers import rank_buffers
from tests.config.refusal import refusal, settings
from tests.optim.small_model import small_config
from tests.optim.test_muon import (
    BETAS,
    EPS,
    LR,
    MODELS,
    SIZES,
    drawn,
    is_matrix,
    matrices_of,
    rate_of,
    relative,
    update,
)
from tests.optim.test_muon import take as take_step

DECAY, OF_MUON = 0.2, {"lr": 0.05, "weight_decay": 0.3}
GROUPS: list[dict[str, Any]] = [
    {"match": "blocks.0.attention.*", "lr": "0.5x", "weight_decay": 0.4},
    {"match": "embedding.*", "lr": 0.007},
    {"match": "blocks.?.*norm.weight", "lr": "3x"},
    {"match": "blocks.*", "weight_decay": 0.01},
]


def wanted_rule(name: str, matrix: bool) -> tuple[float, float]:
    """Peak and weight decay that these groups give a parameter, in words of their own."""
    peak, decay = (OF_MUON["lr"], OF_MUON["weight_decay"]) if matrix else (LR, 0.0 if "norm" in name else DECAY)
    if name.startswith("embedding"):
        return 0.007, decay
    if name.startswith("blocks.0.attention."):
        return 0.5 * peak, 0.4
    if name.startswith("blocks") and "norm" in name:
        return 3 * peak, decay
    return peak, 0.01 if name.startswith("blocks") else decay


def configured(name: str, **optimizer: Any) -> Config:
    chosen = {"name": name, "lr": LR, "weight_decay": DECAY, "betas": list(BETAS), "eps": EPS, "groups": GROUPS}
    chosen |= {"muon": MuonConfig(**OF_MUON)} | optimizer
    config = small_config(model={**SIZES, **MODELS["moe"]}, optimizer=chosen)
    config.precision = "fp64"
    return config


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_group_has_a_rate_and_a_decay_of_its_own(optimizer: str) -> None:
    context = ParallelContext(dtype=torch.float64)
    own = rank_buffers(config := configured(optimizer), context.layout, 0)
    buffers = TrainingBuffers(own.layout, dtype=torch.float64, device=CPU, **own.index)
    weights = {name: 0.1 * values for name, values in drawn(buffers, 0).items()}
    buffers.fill(weights.items())
    ours, momentum = make_optimizer(buffers, config, context), dict[str, torch.Tensor]()
    rules = {name: wanted_rule(name, optimizer == "muon" and is_matrix(name)) for name in weights}
    assert len({*rules.values()}) == 5
    if optimizer == "muon":
        momentum = {name: torch.zeros_like(values) for name, values in weights.items() if is_matrix(name)}
    others = {name: values.requires_grad_() for name, values in weights.items() if name not in momentum}
    torchs = torch.optim.AdamW(
        [{"params": [values], "weight_decay": rules[name][1]} for name, values in others.items()], betas=BETAS, eps=EPS
    )
    for step in range(5):
        gradients, share, decayed = drawn(buffers, 100 + step), rate_of(step) / LR, 1 - step / 5
        for group, name in zip(torchs.param_groups, others, strict=True):
            others[name].grad, group["lr"] = gradients[name], rules[name][0] * share
            group["weight_decay"] = rules[name][1] * decayed
        torchs.step()
        for name, moved in momentum.items():
            flat = weights[name].view(-1), moved.view(-1), gradients[name].view(-1)
            muon = MuonConfig(lr=rules[name][0], weight_decay=rules[name][1] * decayed)
            for at in matrices_of(name, weights[name].shape, "projection"):
                update(*flat, at, rate_of(step), muon)
        take_step(buffers, ours, gradients, rate_of(step), decay_factor=decayed)
        for name, values in weights.items():
            assert relative(buffers.parameter(name), values.detach()) < 1e-12, (step, name)


def test_the_first_pattern_that_fits_has_a_parameter() -> None:
    pairs = zip(GROUPS, parameters_of_groups(configured("adamw")), strict=True)
    found = {group["match"]: {record.name for record in records} for group, records in pairs}
    assert found["blocks.0.attention.*"] == {f"blocks.0.attention.{of}.weight" for of in ("qkv", "out")}
    assert found["blocks.?.*norm.weight"] == {
        f"blocks.{at}.{of}_norm.weight" for at in (0, 1) for of in ("attention", "mlp")
    }
    assert "blocks.1.moe.router.weight" in found["blocks.*"]
    assert not found["blocks.*"] & found["blocks.0.attention.*"]


def test_a_run_says_what_its_groups_are() -> None:
    line, *_, last = lines_of_groups(configured("adamw", groups=GROUPS[:2]))
    numbers = 24 * 4 * 10 + 24 * 10 * (4 + 2 * 2)
    assert (
        line == f"optimizer.groups: blocks.0.attention.* (2 tensors, {numbers:,} parameters): lr 0.5x, weight_decay 0.4"
    )
    assert last.endswith("lr 0.007")


def test_a_schedule_of_weight_decay_is_refused_where_groups_leave_none() -> None:
    def found(*groups: dict[str, Any], **optimizer: Any) -> list[tuple[str, str]]:
        config = configured("adamw", groups=list(groups), **{"weight_decay_schedule": "to_zero"} | optimizer)
        return [(problem.setting, problem.hint) for problem in problems_of_groups(config)]

    none, name = {"match": "*", "weight_decay": 0}, "optimizer.weight_decay_schedule"
    assert found(none) == [(name, f"{name}=constant")]
    assert found({"match": "*weight", "weight_decay": 0}) == [(name, f"{name}=constant")]
    assert found(none, weight_decay_schedule="constant") == []
    assert found() == []
    assert found({"match": "embedding.*", "weight_decay": 0.1}, none) == []
    assert found({"match": "embedding.*", "weight_decay": 0}) == []


def test_patterns_without_a_parameter_are_all_refused_with_the_nearest_names() -> None:
    groups = [{"match": match, "lr": 0.1} for match in ("*.routr.*", "blocks.*", "blocks.1.*", "head.wieght")]
    misspelt, taken, head = problems_of_groups(configured("adamw", groups=groups))
    assert [each.value for each in (misspelt, taken, head)] == ["*.routr.*", "blocks.1.*", "head.wieght"]
    assert misspelt.hint.startswith("match: blocks.*.moe.router.weight or ")
    assert (taken.rule, taken.hint) == ("matches only parameters that earlier groups have", "put it before them")
    assert "weight" in head.hint


@pytest.mark.parametrize(
    ("groups", "flaws"),
    [
        (
            "[{mach: '*', lr: 1}]",
            ["entry 1 has unknown keys (mach) beside match, lr, weight_decay", "entry 1 needs match"],
        ),
        ("[{match: '*'}]", ["sets neither lr nor weight_decay"]),
        ("[{match: '*', lr: 0.1}, {match: '', lr: 0.1}]", ["entry 2 needs match, a pattern"]),
        *(
            (f"[{{match: '*', lr: {lr}}}]", ["entry 1 has an lr"])
            for lr in (
                *("-1", "0.1y", "x", "nanx", "-1x", "true", "null", "inf", "1e999x", f"{'9' * 400}x", "[1]", "1e31"),
                *("1_0x", "0.1X", "' 0.1x'", "'0.1x '", "'0.5'", "infx", "+1x", "0x10"),
            )
        ),
        *(
            (
                f"[{{match: '*', weight_decay: {one}}}]",
                ["a weight_decay that is not a number from 0 to 1e30 (text is none)"],
            )
            for one in ("-0.1", "0.1x", "null", "nan", "inf", "true", "'0.5'", "'nan'", "1e31", "[1]")
        ),
        ("[{match: 3, lr: 0.1y, decay: 1}]", ["keys (decay)", "needs match", "has an lr"]),
        ("[router]", ["must be a list of groups"]),
        ("{match: '*', lr: 1}", ["must be a list of groups"]),
    ],
)
def test_groups_that_cannot_be_are_refused_with_all_that_is_wrong(groups: str, flaws: list[str]) -> None:
    error = refusal(f"optimizer.groups={groups}")
    assert settings(error) == ["optimizer.groups"]
    assert all(flaw in error.problems[0].rule for flaw in flaws), error
    assert "optimizer.groups=[" in error.problems[0].hint


@pytest.mark.parametrize("rate", ["0x", "0.1x", "1e-2x", "2.5E+1x", ".5x", "3x", 0, 3, 3e-4])
def test_a_rate_is_a_factor_or_a_number(rate: float | str) -> None:
    assert flaws_of_groups([{"match": "*", "lr": rate, "weight_decay": 0}]) == []


def test_numbers_of_any_length_are_judged() -> None:
    """A config file may hold them."""
    for key in ("lr", "weight_decay"):
        [flaw] = flaws_of_groups([{"match": "*", key: 10**400}])
        assert key in flaw

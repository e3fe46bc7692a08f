"""Rules of a mixture of experts: each refusal names the numbers, and every value that a remedy tells works."""

import re

import pytest

from megalite.config.compose import load_config
from megalite.config.derive import derive
from megalite.config.rules import check
from megalite.config.schema import Config, MoEConfig
from megalite.config.settings import with_values
from megalite.errors.problems import UserError
from tests.config.test_rules import problems_of

MOE = "model.moe"
EIGHT = "model.moe.num_experts=8"

# Command line, world size, the setting that is named, and words of the message.
BROKEN = [
    ("model.moe.top_k=9", 1, "top_k", ["has no effect with model.moe.num_experts=0", "fix: model.moe.num_experts=16,"]),
    (f"{EIGHT} model.moe.capacity_factor=-1", 1, "capacity_factor", ["above 0", "model.moe.capacity_factor=null"]),
    ("parallel.ep=4", 4, "parallel.ep", ["has no effect", "num_experts=8, or parallel.ep=1"]),
    ("parallel.etp=2", 2, "parallel.etp", ["has no effect", "num_experts=8, or parallel.etp=null"]),
    ("parallel.etp=1 parallel.tp=2", 2, "parallel.etp", ["has no effect"]),
    (
        "train.recompute=selective train.recompute_modules=[moe,norm]",
        1,
        "train.recompute_modules",
        ["moe has no effect", "=[norm]"],
    ),
    (
        f"{EIGHT} model.moe.first_dense_layers=4",
        1,
        "first_dense_layers",
        ["no layer of model.num_layers=4", "first_dense_layers=3, or model.num_layers=5 or 6 or 7"],
    ),
    (
        f"{EIGHT} model.moe.first_dense_layers=4 parallel.pp=2",
        2,
        "first_dense_layers",
        ["model.num_layers=6 or 8 or 10"],
    ),
    (
        f"{EIGHT} model.moe.layer_freq=5",
        1,
        "layer_freq",
        ["more than the layers, model.num_layers=4", "layer_freq=1 or 2 or 4, or model.num_layers=5 or 6 or 7"],
    ),
    (
        f"{EIGHT} model.moe.layer_freq=3 model.moe.first_dense_layers=2",
        1,
        "layer_freq",
        ["of which 2 are dense at the start", "layer_freq=1 or 2, or model.num_layers=5"],
    ),
    (f"{EIGHT} model.moe.num_groups=3", 1, "num_experts", ["num_groups=3", "num_groups=1 or 2 or 4", "6 or 9 or 12"]),
    (f"{EIGHT} model.moe.top_k_groups=2", 1, "top_k_groups", ["there are model.moe.num_groups=1", "top_k_groups=1"]),
    (f"{EIGHT} model.moe.top_k=9", 1, "top_k", ["there are model.moe.num_experts=8", "top_k=8", "9 or 10 or 11"]),
    (f"{EIGHT} model.moe.top_k=9 parallel.ep=2", 2, "top_k", ["top_k=8, or model.moe.num_experts=10 or 12 or 14"]),
    (
        f"{EIGHT} model.moe.num_groups=4 model.moe.top_k=3",
        1,
        "top_k",
        ["1 of 4 groups hold 2 of 8 experts", "top_k=2, or model.moe.top_k_groups=3"],
    ),
    (
        f"{EIGHT} model.moe.num_groups=4 model.moe.top_k_groups=2 model.moe.top_k=3",
        1,
        "top_k",
        ["not a multiple of model.moe.top_k_groups=2", "top_k=2 or 4, or model.moe.top_k_groups=3"],
    ),
    (
        f"{EIGHT} model.moe.top_k=1",
        1,
        "top_k",
        ["learns nothing (model.moe.pre_softmax=false)", "pre_softmax=true, or model.moe.top_k=2, or"],
    ),
    (f"{EIGHT} model.moe.expert_bias_rate=0.001", 1, "expert_bias_rate", ["score=softmax", "fix: model.moe.score=sig"]),
    (
        f"{EIGHT} model.moe.pre_softmax=true model.moe.score=sigmoid",
        1,
        "pre_softmax",
        ["has no effect with model.moe.score=sigmoid", "pre_softmax=false, or model.moe.score=softmax"],
    ),
    (
        f"{EIGHT} model.moe.normalize_weights=false",
        1,
        "normalize_weights",
        ["has the sum 1 as it is", "=true, or model.moe.pre_softmax=true, or model.moe.score=sigmoid"],
    ),
    (
        f"{EIGHT} model.moe.capacity_factor=0.4",
        1,
        "capacity_factor",
        ["with model.moe.top_k=2", "capacity_factor=1.0 or null"],
    ),
    (
        "model.moe.num_experts=6 parallel.ep=4",
        4,
        "num_experts",
        ["does not split over parallel.ep=4", "parallel.ep=1 or 2, or model.moe.num_experts=4 or 8 or 12"],
    ),
    (
        f"{EIGHT} model.moe.ffn_hidden_size=33 parallel.tp=2",
        2,
        "ffn_hidden_size",
        ["parallel.tp=2, which parallel.etp follows", "30 or 32 or 34, or parallel.etp=1"],
    ),
    (f"{EIGHT} model.moe.ffn_hidden_size=32 model.ffn_hidden_size=33 parallel.tp=2", 2, "", []),  # no layer has an MLP
    (
        f"{EIGHT} model.moe.ffn_hidden_size=32 model.ffn_hidden_size=33 model.moe.layer_freq=2 parallel.tp=2",
        2,
        "model.ffn_hidden_size",
        ["does not split over parallel.tp=2", "32 or 34"],
    ),
    (f"{EIGHT} model.moe.ffn_hidden_size=33 parallel.etp=2", 2, "ffn_hidden_size", ["over parallel.etp=2", "etp=1"]),
    (
        f"{EIGHT} model.moe.ffn_hidden_size=33 model.moe.num_shared_experts=3 parallel.tp=2 parallel.etp=1",
        2,
        "ffn_hidden_size",
        ["shared experts, 99 wide together, do not split over parallel.tp=2", "30 or 32 or 34, or parallel.tp=1"],
    ),
    (
        f"{EIGHT} parallel.tp=2 parallel.sequence_parallel=false",
        2,
        "parallel.sequence_parallel",
        ["its own part of the sequence", "parallel.sequence_parallel=null, or parallel.tp=1"],
    ),
    (
        f"{EIGHT} model.moe.score=sigmoid parallel.ep=2 parallel.tp=2 parallel.sequence_parallel=false",
        4,
        "parallel.sequence_parallel",
        ["parallel.sequence_parallel=null"],
    ),
    (f"{EIGHT} parallel.ep=4 optimizer.instances=2", 8, "", []),
    (f"{EIGHT} parallel.ep=4 optimizer.instances=4", 8, "optimizer.instances", ["edp = 2", "instances=1 or 2"]),
    (
        f"{EIGHT} parallel.ep=4 parallel.pp=2 train.global_batch_size=12",
        12,
        "world size",
        ["parallel.tp=1 x parallel.ep=4 x parallel.pp=2 = 8, the ranks of one set of experts", "parallel.ep=1 or 2"],
    ),
    (
        f"{EIGHT} parallel.ep=2 parallel.etp=2 parallel.pp=2 train.global_batch_size=12",
        12,
        "world size",
        ["parallel.etp=2 x parallel.ep=2 x parallel.pp=2 = 8", "parallel.etp=1, or parallel.ep=1, or parallel.pp=1"],
    ),
    (
        f"{EIGHT} parallel.ep=4 parallel.pp=2 parallel.order=tp-ep-pp-dp",
        8,
        "parallel.order",
        ["1 ranks apart for dense layers, 4 for experts", "parallel.order=tp-ep-dp-pp"],
    ),
]


@pytest.mark.parametrize(
    ("line", "world_size", "name", "words"), BROKEN, ids=[f"{row[0]} on {row[1]}" for row in BROKEN]
)
def test_a_broken_rule_is_told_with_values_that_work(line: str, world_size: int, name: str, words: list[str]) -> None:
    """Every `name=value or value` of the remedy is tried on top of the refused command."""
    problems = problems_of(line, world_size)
    if not name:
        assert problems == []
        return
    (problem,) = problems
    assert problem.setting == (name if "." in name or " " in name else f"{MOE}.{name}")
    assert all(word in str(problem) for word in words), str(problem)
    advised = re.findall(r"([a-z_.]+|world size)=(\[[^\]]+\]|[\w.-]+(?: or [\w.-]+)*)", problem.remedy)
    assert advised, problem.remedy
    for setting, values in advised:
        for value in values.split(" or "):
            world = int(value) if setting == "world size" else world_size
            changed = "" if setting == "world size" else f" {setting}={value}"
            assert problems_of(line + changed, world) == [], (setting, value)


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ({f"{MOE}.num_experts": 8}, 1),
        ({f"{MOE}.num_experts": 8, "parallel.ep": 4, "parallel.tp": 2}, 8),
        ({f"{MOE}.num_experts": 8, f"{MOE}.num_groups": 4, f"{MOE}.top_k_groups": 2, f"{MOE}.top_k": 4}, 1),
        ({f"{MOE}.num_experts": 8, f"{MOE}.score": "sigmoid", f"{MOE}.expert_bias_rate": 1e-3, f"{MOE}.top_k": 1}, 1),
        ({f"{MOE}.num_experts": 8, f"{MOE}.top_k": 1, f"{MOE}.pre_softmax": True}, 1),
        ({f"{MOE}.num_experts": 8, f"{MOE}.aux_loss": "global", f"{MOE}.aux_loss_coeff": 0.0}, 1),
        ({f"{MOE}.num_experts": 8, "train.recompute": "selective", "train.recompute_modules": ["moe"]}, 1),
    ],
)
def test_what_works_is_accepted_and_so_is_the_config_of_such_a_run(
    settings: dict[str, object], world_size: int
) -> None:
    config = with_values(Config(), settings)
    derived = derive(config, world_size)
    assert check(config, world_size) == check(derived, world_size) == []


@pytest.mark.parametrize("preset", ["tiny_moe", "mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3_moe_part"])
def test_a_preset_without_its_experts_is_dense(preset: str) -> None:
    """What the preset says of them is forgotten; what the command itself says of them has no effect."""
    without = [f"model={preset}", f"{MOE}.num_experts=0"]
    assert load_config(without, 1).model.moe == MoEConfig()
    with pytest.raises(UserError) as refused:
        load_config([*without, f"{MOE}.top_k=3"], 1)
    (problem,) = refused.value.problems
    assert problem.setting == f"{MOE}.top_k"
    assert load_config([*without, f"{MOE}.top_k=2"], 1).model.moe == MoEConfig()

"""How updates follow the model's size; tests/train/test_mup.py compares whole trainings with the papers' model."""

from math import sqrt

import pytest

from megalite.config.schema import Config, MoEConfig, MuonConfig, OptimizerConfig
from megalite.model.parameters import gpt_parameters
from megalite.model.scaling import SCALES, lines_of_scaling
from megalite.optim.groups import UpdateRule, update_rules
from tests.model.small import FAMILIES, small


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_base_nothing_is_scaled(family: str) -> None:
    """No start value, rate, eps or decay differs by a bit from what it was before there were factors."""
    config = Config(model=small(**FAMILIES[family], moe=MoEConfig(4, ffn_hidden_size=20, first_dense_layers=1)))
    records = gpt_parameters(config.model)
    assert {record.role for record in records} >= {"input", "hidden", "residual", "router", "output", "vector"}
    stds = {"normal": {0.3, 0.3 / 2}, "ones": {1.0}, "zeros": {0.0}}
    assert all(record.std in stds[record.init] for record in records)
    rules = update_rules(records, config).items()
    assert {rule for _, rule in rules} == {UpdateRule(1.0, 0.1, 1.0), UpdateRule(1.0, 0.0, 1.0)}


@pytest.mark.parametrize("scale", ["match_adamw", "max_ratio", "ratio"])
@pytest.mark.parametrize("qkv", ["projection", "head"])
@pytest.mark.parametrize("experts", [3, 64])
def test_an_update_of_muon_has_the_same_effect_at_every_width(scale: str, qkv: str, experts: int) -> None:
    """The largest singular value of an update, over sqrt(outputs / inputs), is that of the base (Yang et al. 2023), and
    over the depth where the layer adds to the residual stream. Decay takes the same share of a weight. 64 experts are
    more than the base is wide."""
    muon = MuonConfig(scale=scale, qkv=qkv)
    optimizer = OptimizerConfig(name="muon", muon=muon)
    sizes = {"num_key_value_heads": 4, "num_attention_heads": 4, "ffn_hidden_size": 96, "head_size": 6}
    base = small(**sizes, num_layers=1, moe=MoEConfig(experts, ffn_hidden_size=48))
    wide = {name: 9 * size for name, size in sizes.items() if name != "head_size"} | {"hidden_size": 9 * 24}
    moe, bases = MoEConfig(experts, ffn_hidden_size=9 * 48), {"mup_base_width": 24, "mup_base_layers": 1}
    effects = []
    for model in (base, small(**wide, head_size=6, num_layers=5, moe=moe, **bases)):
        config, found = Config(model=model, optimizer=optimizer), dict[str, tuple[float, float]]()
        rules = update_rules(records := gpt_parameters(model), config)
        for record in (
            record for record in records if record.stacked is not None and record.name.startswith("blocks.0")
        ):
            outputs, inputs = record.shape[-2:]
            if record.heads:
                outputs = record.shape[-2] * (1 if qkv == "head" else record.shape[0])
            rule = rules[record.name]
            largest = SCALES[scale](outputs, inputs, muon.rms) * rule.factor * sqrt(inputs / outputs)
            found[record.name] = largest, rule.factor * rule.decay
        effects.append(found)
    at_base, at_width = effects
    for name, (largest, share) in at_base.items():
        depth = 5 if name.endswith(("out.weight", "down.weight")) else 1
        assert at_width[name] == pytest.approx((largest / depth, share)), name


def test_groups_are_numbers_of_the_base() -> None:
    """A factor, a peak and a decay of optimizer.groups scale with the model as those of its kind do."""
    groups = [{"match": "*.qkv.*", "lr": "2x", "weight_decay": 0.3}, {"match": "*.mlp.*", "lr": 5e-4}]
    model = small(mup_base_width=12, mup_base_layers=1)
    rules = update_rules(gpt_parameters(model), Config(model=model, optimizer=OptimizerConfig(groups=groups)))
    assert rules["blocks.0.attention.qkv.weight"] == UpdateRule(2 / 2, 0.3 * 2, 1 / 4)
    assert rules["blocks.0.mlp.down.weight"] == UpdateRule(0.5 / 4, 0.1 * 4, 1 / 2)
    assert rules["blocks.0.attention.out.weight"] == UpdateRule(1 / 4, 0.1 * 4, 1 / 2)


def test_a_run_says_how_it_is_scaled() -> None:
    [line] = lines_of_scaling(small(mup_base_width=12, num_layers=8))
    assert line.startswith("2 times as wide and 1 times as deep as the base")
    assert not [*lines_of_scaling(small())]

"""The presets compose, and have the published number of parameters."""

from dataclasses import replace

import pytest

from megalite.config.compose import load_config
from megalite.model.parameters import gpt_parameters

# Vocabulary, and parameters as the published weights hold them (GPT-3: the paper's figure, rounded).
PUBLISHED = {
    "gpt2": (50257, 124_439_808),
    "gpt2_medium": (50257, 354_823_168),
    "gpt2_large": (50257, 774_030_080),
    "gpt2_xl": (50257, 1_557_611_200),
    "llama3_8b": (128256, 8_030_261_248),
    "llama3_70b": (128256, 70_553_706_496),
    "qwen3_0_6b": (151936, 596_049_920),
    "qwen3_8b": (151936, 8_190_735_360),
    "mixtral_8x7b": (32000, 46_702_792_704),
    "qwen3_30b_a3b": (151936, 30_532_122_624),
}


def parameters(preset: str, vocab_size: int) -> int:
    overrides = [f"model={preset}", "train.seq_length=1024", f"model.vocab_size={vocab_size}", "model.vocab_multiple=1"]
    return sum(record.numel for record in gpt_parameters(load_config(overrides, 1).model))


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_published_shape_has_the_published_parameters(preset: str) -> None:
    vocab_size, count = PUBLISHED[preset]
    assert parameters(preset, vocab_size) == count


def test_gpt3_has_the_175_billion_parameters_of_the_paper() -> None:
    assert round(parameters("gpt3_175b", 50257) / 1e9) == 175


def test_deepseek_has_the_published_parameters_but_for_its_attention() -> None:
    queries, keys_and_values = 1536 * (7168 + 1 + 128 * 192), 7168 * 576 + 512 * (1 + 128 * 256)
    published = 671_026_404_352  # without the part that predicts a second token
    ours, theirs = 4 * 7168 * 128 * 128, queries + keys_and_values + 128 * 128 * 7168
    assert parameters("deepseek_v3_moe_part", 129280) == published + 61 * (ours - theirs)


def test_the_tiny_mixture_computes_as_much_as_the_tiny_model() -> None:
    model = load_config(["model=tiny_moe"], 1).model
    moe, tiny = model.moe, load_config([], 1).model
    assert moe.top_k * (moe.ffn_hidden_size or 0) == tiny.ffn_hidden_size
    assert (moe.num_experts, replace(model, name="tiny", moe=tiny.moe)) == (8, tiny)


@pytest.mark.parametrize(
    ("preset", "table", "scale", "decay"),
    [
        ("muon_moonlight", ("jordan", 5), ("match_adamw", 0.2), 0.1),
        ("muon_keller", ("jordan", 5), ("max_ratio", 0.2), 0.0),
        ("muon_deepseek_v4", ("deepseek_v4", 10), ("match_adamw", 0.18), 0.1),
    ],
)
def test_presets_of_muon_are_what_was_published(
    preset: str, table: tuple[str, int], scale: tuple[str, float], decay: float
) -> None:
    optimizer = load_config([f"optimizer={preset}"], 1).optimizer
    muon = optimizer.muon
    assert (optimizer.name, muon.momentum, muon.nesterov, muon.qkv, muon.router) == (
        *("muon", 0.95, True, "projection", True),
    )
    assert ((muon.coefficients, muon.steps), (muon.scale, muon.rms)) == (table, scale)
    assert (optimizer.weight_decay, optimizer.betas) == (decay, [0.9, 0.95])
    assert (muon.lr, muon.weight_decay) == (0.02 if preset == "muon_keller" else None, None)


def test_the_default_optimizer_is_adamw() -> None:
    assert load_config(["optimizer=adamw"], 1) == load_config([], 1)
    assert load_config(["optimizer=muon"], 1).optimizer.muon == load_config([], 1).optimizer.muon


def test_the_default_is_the_tiny_model() -> None:
    default = load_config([], 1)
    assert default == load_config(["model=default"], 1)

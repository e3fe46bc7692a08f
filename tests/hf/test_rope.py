"""Scaled rotary positions are those of transformers, and its config.json says the same as our settings."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megalite.config.schema import ModelConfig
from megalite.config.settings import leaves
from megalite.hf.families import FAMILIES
from megalite.model.rotary import rotary_frequencies, rotary_magnitude
from tests.model.small import small

LLAMA = FAMILIES["llama"]
YARN: dict[str, Any] = {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_positions": 4096}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": "linear", "rope_scaling_factor": 4.0},
    "llama 3.1": {"rope_scaling_factor": 8.0, "rope_original_positions": 8192, "rope_theta": 5e5},
    "llama3, other borders": {
        "rope_scaling_factor": 3.0,
        "rope_original_positions": 512,
        "rope_low_frequency_factor": 2.0,
        "rope_high_frequency_factor": 9.0,
    },
    "yarn": YARN,
    "yarn of DeepSeek-V3": {**YARN, "rope_scaling_factor": 40.0, "rope_mscale": 1.0, "rope_mscale_all_dim": 1.0},
    "yarn, two scales": {**YARN, "rope_mscale": 1.2, "rope_mscale_all_dim": 0.7},
    "yarn, its own magnitude": {**YARN, "rope_attention_factor": 1.07},
    "yarn, other borders": {**YARN, "rope_beta_slow": 2.5, "rope_beta_fast": 20.0},
    "yarn, borders of gpt-oss": {**YARN, "rope_scaling_factor": 32.0, "rope_truncate": False, "rope_theta": 1.5e5},
    "yarn, no border inside": {**YARN, "rope_original_positions": 7, "rope_scaling_factor": 2.5},
    "yarn, all pairs kept": {**YARN, "rope_original_positions": 2**30, "rope_theta": 10.0},
}


def theirs(config: ModelConfig) -> Any:
    """The configuration that transformers makes of ours."""
    keys = LLAMA.describe(leaves(asdict(config))) | {"max_position_embeddings": 2**31}
    return transformers.LlamaConfig(**{key: value for key, value in keys.items() if key != "model_type"})


@pytest.mark.parametrize("head_size", [64, 128, 6])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_magnitude_and_settings_are_those_of_transformers(case: str, head_size: int) -> None:
    config = small(head_size=head_size, **CASES[case])
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[config.rope_scaling](theirs(config), torch.device("cpu"))
    ours = rotary_frequencies(config)
    assert (ours - frequencies).abs().max() < 1e-6
    assert ((ours - frequencies) / ours).abs().max() < 2e-6, "the low ones, too; theirs are fp32"
    assert abs(rotary_magnitude(config) - magnitude) < 1e-12
    written = theirs(config).to_dict()
    assert "rope_scaling" not in written, "transformers 5 calls it rope_parameters"
    found = {name: value for name, value in LLAMA.settings(written).items() if name.startswith("rope_")}
    assert found == {name: getattr(config, name) for name in found}, "our settings come back"
    assert found.items() >= {"rope_theta": 10000.0, **CASES[case]}.items()


def test_the_cases_scale_and_differ() -> None:
    """Else a setting that nobody reads would pass."""
    configs = [small(head_size=64, **case) for case in ({}, *CASES.values())]
    tables = [(*rotary_frequencies(config).tolist(), rotary_magnitude(config)) for config in configs]
    assert len(set(tables)) == len(tables)


def yarn_file(**keys: Any) -> dict[str, Any]:
    """config.json of a Llama with these `rope_parameters`; None: without that key."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024, **keys}
    rope = {key: value for key, value in rope.items() if value is not None}
    return LLAMA.describe(leaves(asdict(small()))) | {"max_position_embeddings": 8192, "rope_parameters": rope}


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        ({"original_max_position_embeddings": None}, {"rope_original_positions": 8192}),
        ({"factor": None}, {"rope_scaling_factor": 8.0}),
        ({"beta_fast": 0, "beta_slow": 0}, {}),
        ({"mscale": 0.7}, {}),
        ({"mscale": 0.7, "mscale_all_dim": 0}, {}),
        ({"mscale": 0.7, "mscale_all_dim": 0.5, "attention_factor": 1.1}, {"rope_attention_factor": 1.1}),
    ],
)
def test_what_yarn_leaves_out_is_what_transformers_takes(keys: dict[str, Any], changes: dict[str, Any]) -> None:
    plain = LLAMA.settings(yarn_file())
    assert (plain["rope_scaling"], plain["rope_beta_slow"], plain["rope_beta_fast"]) == ("yarn", 1.0, 32.0)
    assert LLAMA.settings(yarn_file(**keys)) == plain | changes


def test_a_factor_of_one_is_no_scaling() -> None:
    found = LLAMA.settings(yarn_file(factor=1.0))
    assert found["rope_scaling_factor"] == 1.0
    assert "rope_scaling" not in found
    for keys in ({"factor": 1.0}, {"factor": None, "original_max_position_embeddings": 8192}):  # or counted as 1
        told = [*LLAMA.beyond(yarn_file(**keys, attention_factor=1.2))]
        assert told == [("attention_factor", 1.2, "1 with factor=1")]

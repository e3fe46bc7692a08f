"""What an import accepts, and how it refuses everything else: all problems at once, with what to do."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalite.config.derive import derive_model
from megalite.config.model_folder import imported_model_settings
from megalite.config.schema import ModelConfig
from megalite.errors.problems import Problem, UserError, collect
from megalite.hf.saved_model import import_model
from tests.hf.peers import PEERS, change_config, matching_config, model_of, save_peer


def refusal(folder: Path, config: ModelConfig) -> UserError:
    with pytest.raises(UserError) as refused:
        list(import_model(folder, config))
    return refused.value


def change_tensors(folder: Path, **changes: Any) -> None:
    """Replace (or, with None, remove) tensors of model.safetensors; `__` in a name stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")


def test_tensors_keep_the_dtype_of_the_file_and_padding_rows_are_zero(tmp_path: Path) -> None:
    save_peer("gpt2", tmp_path, dtype=torch.bfloat16)
    values = dict(import_model(tmp_path, matching_config(tmp_path, vocab_size=None)))  # which is the folder's
    word = values["embedding.word.weight"]
    assert word.dtype == torch.bfloat16
    assert word.shape == (64, 24)
    assert word[:53].any(dim=1).all()
    assert not word[53:].any()


def test_old_folders_with_masks_and_without_prefix_are_read(tmp_path: Path) -> None:
    save_peer("gpt2", tmp_path)
    config = matching_config(tmp_path)
    expected = dict(import_model(tmp_path, config))
    tensors = load_file(tmp_path / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file({**old, "h.0.attn.bias": torch.ones(1, 1, 32, 32)}, tmp_path / "model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in import_model(tmp_path, config))


def test_settings_of_a_folder_before_transformers_5(tmp_path: Path) -> None:
    save_peer("llama", tmp_path)
    scaling = {"type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
    scaling |= {"original_max_position_embeddings": 99}
    absent = dict.fromkeys(("rope_parameters", "head_dim", "num_key_value_heads"))
    change_config(tmp_path, rope_theta=123.0, rope_scaling=scaling, **absent)
    settings = imported_model_settings(tmp_path)
    assert settings["rope_theta"] == 123.0
    assert (settings["rope_scaling_factor"], settings["rope_original_positions"]) == (4.0, 99)
    assert (settings["head_size"], settings["num_key_value_heads"]) == (4, 6)


def test_every_difference_of_the_shape_is_listed_with_its_override(tmp_path: Path) -> None:
    save_peer("qwen3", tmp_path)
    config = matching_config(tmp_path, num_layers=3, norm_eps=1e-5, qk_norm=False, vocab_size=60)
    problems = {problem.setting: problem.hint for problem in refusal(tmp_path, config).problems}
    assert problems == {
        "model.num_layers": "model.num_layers=2",
        "model.norm_eps": "model.norm_eps=0.0001",
        "model.qk_norm": "model.qk_norm=true",
        "model.vocab_size": "model.vocab_size=53",
    }


def test_all_tensors_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    save_peer("llama", tmp_path)
    config = matching_config(tmp_path)
    change_tensors(
        tmp_path,
        model__norm__weight=None,
        model__layers__0__mlp__up_proj__weight=torch.zeros(24, 40),
        model__layers__1__mlp__down_proj__weight=torch.zeros(24, 40, dtype=torch.int8),
        model__layers__7__mlp__extra=torch.zeros(3),
    )
    message = str(refusal(tmp_path, config))
    assert "4 problems" in message
    for part in ("norm.weight of the shape [24]", "[40, 24]", "[24, 40]", "model.layers.7.mlp.extra"):
        assert part in message
    save_peer("llama", tmp_path)
    change_tensors(tmp_path, model__norm__weight=torch.full((24,), float("nan"), dtype=torch.float64))
    assert "finite numbers, unlike model.norm.weight" in str(refusal(tmp_path, config))


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("llama", {"rope_scaling": {"type": "longrope"}, "rope_parameters": None}, "rope_type='longrope'"),
        ("llama", {"partial_rotary_factor": 0.5, "rope_parameters": None}, "partial_rotary_factor=0.5"),
        ("llama", {"attention_bias": True, "mlp_bias": False}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "attention_bias=False"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ("mixtral", {"sliding_window": 4096}, "sliding_window=4096"),
        ("qwen3_moe", {"mlp_only_layers": [2], "decoder_sparse_step": 1}, "mlp_only_layers with"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu'"),
    ],
)
def test_a_sound_model_that_no_setting_says_is_not_called_damaged(
    family: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PEERS[family].to_dict() | changes))
    message = str(refusal(tmp_path, ModelConfig()))
    assert f"config.json: {told}" in message
    assert message.count("no setting here says it") == 1
    assert "1 problem:" in message
    assert "damaged" not in message


WRONG: list[Any] = ["32", 0, -1, 0.5, 10**9, math.nan, math.inf, 1e-400, True, None, [], [[1]], {"a": 1}]


@pytest.mark.parametrize("name", [*PEERS])
def test_no_value_of_a_config_json_ends_in_a_traceback_or_in_silence(name: str, tmp_path: Path) -> None:
    """Every key with every kind of value, in the file and in its rotary scaling: settings that keep all bounds, or a
    refusal that names the key and blames no setting of ours."""
    sound: dict[str, Any] = json.loads(PEERS[name].to_json_string(use_diff=False))
    nested = [("rope_parameters", key) for key in sound.get("rope_parameters") or ()]
    begin, refused = time.monotonic(), set()
    for group, key in [*((None, key) for key in sound), *nested]:
        for value in WRONG:
            told = {key: value} if group is None else {group: sound[group] | {key: value}}
            (tmp_path / "config.json").write_text(json.dumps(sound | told))
            problems: list[Problem] = []
            settings = collect(lambda: imported_model_settings(tmp_path), problems)
            assert all(str(tmp_path) in one.setting for one in problems), (key, value)
            assert "model." not in "".join(one.hint for one in problems), (key, value)
            if settings is None:
                refused.add(key)
            else:
                model = model_of(settings)
                assert derive_model(model, 32).num_layers <= 10_000, (key, value)
                assert math.isfinite(model.norm_eps), (key, value)
    assert refused > {"vocab_size", "model_type"} | ({"n_head"} if name.startswith("gpt2") else {"rms_norm_eps"})
    assert time.monotonic() - begin < 60


def test_a_folder_that_is_not_there_or_not_a_whole_model_is_refused(tmp_path: Path) -> None:
    assert "nothing is downloaded" in str(refusal(tmp_path / "absent", ModelConfig()))
    assert "config.json" in str(refusal(tmp_path, ModelConfig()))
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in str(refusal(tmp_path, ModelConfig()))
    save_peer("gpt2", tmp_path)
    config, path = matching_config(tmp_path), tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "complete safetensors file" in str(refusal(tmp_path, config))

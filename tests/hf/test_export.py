"""An export is the inverse of an import, transformers computes with it what we do, and layouts leave no trace in it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from megalite.config.model_folder import imported_model_settings
from megalite.config.schema import ModelConfig, MoEConfig
from megalite.errors.problems import UserError
from megalite.hf.export import export_model, family_of
from megalite.hf.saved_model import import_model
from megalite.model.init import start_values
from megalite.model.parameters import gpt_parameters
from tests.hf.peers import PEERS, batch_of, largest_error, matching_config, of_random_weights, save_peer, small


def export(config: ModelConfig, folder: Path, **options: Any) -> Path:
    values = start_values(gpt_parameters(config), seed=3)
    export_model(values, config, folder, torch.float32, context_length=32, **options)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def refusal(config: ModelConfig, folder: Path, **options: Any) -> str:
    with pytest.raises(UserError) as refused:
        export(config, folder, **options)
    return str(refused.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PEERS)
def test_what_was_imported_is_exported_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_peer(name, tmp_path / "theirs", dtype=dtype)
    config = matching_config(tmp_path / "theirs")
    values = import_model(tmp_path / "theirs", config)
    export_model(values, config, tmp_path / "ours", dtype, context_length=32)
    theirs, ours = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "ours")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == dtype
        assert torch.equal(ours[key], tensor), key
    assert imported_model_settings(tmp_path / "ours") == imported_model_settings(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {}),
        ("gpt2", {"activation": "gelu", "tie_embeddings": False, "dropout": 0.1}),
        ("llama", {}),
        ("llama", {"mup_base_width": 12, "mup_base_layers": 1}),
        ("llama", {"bias": True, "tie_embeddings": True}),
        ("llama", {"rope_scaling_factor": 8.0, "rope_original_positions": 16}),
        ("llama", {"rope_scaling": "linear", "rope_scaling_factor": 3.0}),
        ("qwen3", {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_positions": 8}),
        ("qwen3", {}),
        ("qwen3", {"tie_embeddings": False, "rope_scaling_factor": 4.0, "rope_original_positions": 8}),
        ("mixtral", {}),
        ("mixtral", {"moe": MoEConfig(num_experts=4, top_k=1, ffn_hidden_size=20), "head_size": 10}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"moe": MoEConfig(4, 3, ffn_hidden_size=20, pre_softmax=True, normalize_weights=False)}),
        ("qwen3_moe", {"moe": MoEConfig(4, 1, ffn_hidden_size=20, pre_softmax=True)}),
    ],
)
def test_transformers_computes_the_logits_that_we_do(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = small(family, **changes)
    model, values = of_random_weights(config)
    export_model(values, config, tmp_path / "ours", torch.float64, context_length=32, end_of_document=7)
    peer, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours",
        dtype=torch.float64,
        output_loading_info=True,
        attn_implementation="eager",
        **({"experts_implementation": "eager"} if config.moe.num_experts else {}),
    )
    assert not any(told.values()), told
    for about in (peer.config, peer.generation_config):
        assert (about.bos_token_id, about.eos_token_id) == (7, 7)
    assert peer.config.max_position_embeddings == 32
    tokens = torch.randint(53, (2, 21), generator=torch.Generator().manual_seed(1))
    bound = 1e-9 if family == "gpt2" else 1e-6  # transformers computes RMSNorm of fp64 models in fp32
    assert largest_error(model.logits(batch_of(tokens)), peer.eval()(input_ids=tokens[:, :-1]).logits, bound) <= 1


def test_a_model_in_several_files_is_the_same_model(tmp_path: Path) -> None:
    config = small("llama")
    whole = tensors_of(export(config, tmp_path / "one"))
    parts = export(config, tmp_path / "parts", max_shard_size="20KB")
    names = sorted(path.name for path in parts.glob("*.safetensors"))
    assert len(names) > 2
    for name in names:
        contents = load_file(parts / name)
        assert safe_open(parts / name, framework="pt").metadata() == {"format": "pt"}  # transformers 4 insists
        assert len(contents) == 1 or sum(tensor.nbytes for tensor in contents.values()) <= 20_000
    assert tensors_of(parts).keys() == whole.keys()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(parts).state_dict()
    assert all(torch.equal(loaded[key], whole[key]) for key in whole)
    one, again = (dict(import_model(folder, config)) for folder in (tmp_path / "one", parts))
    assert all(torch.equal(again[name], value) for name, value in one.items())


@pytest.mark.parametrize(
    ("changes", "length"), [({}, 25), ({"rope_scaling": "llama3"}, 32), ({"rope_scaling_factor": 1.0}, 32)]
)
def test_the_length_told_of_yarn_is_the_stretched_one(changes: dict[str, Any], length: int, tmp_path: Path) -> None:
    """transformers 4 divides it by the original length, and takes that for the factor."""
    yarn = {"rope_scaling": "yarn", "rope_scaling_factor": 2.5, "rope_original_positions": 10}
    folder = export(small("llama", **yarn | changes), tmp_path / "ours")
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == length


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gpt2", {"position": "rope"}, "gpt2 has model.position=learned"),
        ("gpt2", {"bias": False}, "gpt2 has model.bias=true"),
        ("gpt2", {"num_key_value_heads": 2}, "gpt2 has model.num_key_value_heads=4"),
        ("gpt2", {"head_size": 8}, "gpt2 has model.head_size=6"),
        ("llama", {"norm": "layernorm"}, "qwen3 has model.norm=rmsnorm, model.qk_norm"),
        ("llama", {"position": "learned"}, "llama has model.position=rope"),
        ("llama", {"hidden_size": 26, "head_size": 6}, "llama has model.hidden_size=a multiple of 4"),
        ("qwen3", {"bias": True}, "qwen3 has model.bias=false"),
        ("mixtral", {"moe": MoEConfig(4, 2, 20, score="sigmoid")}, "mixtral has model.moe.score=softmax"),
        ("mixtral", {"moe": MoEConfig(4, 2, 20, num_shared_experts=1)}, "qwen3_moe has model.moe.num_shared_experts=0"),
        ("mixtral", {"moe": MoEConfig(4, 2, 20, scaling_factor=2.5)}, "model.moe.scaling_factor=1.0"),
        ("mixtral", {"moe": MoEConfig(4, 2, 20, num_groups=2)}, "model.moe.num_groups=1"),
    ],
)
def test_settings_that_no_family_expresses_are_refused_by_name(
    family: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    assert family_of(small(family)).model_type == family
    assert named in refusal(small(family, **changes), tmp_path / "ours")
    assert not list(tmp_path.iterdir())


def test_what_fails_on_the_way_leaves_no_folder(tmp_path: Path) -> None:
    config = small("llama")
    values = dict(start_values(gpt_parameters(config), seed=3))

    def broken() -> Any:
        yield from list(values.items())[:5]
        assert len(list(tmp_path.iterdir())) == 1  # unfinished, under another name
        assert not (tmp_path / "ours").exists()
        raise RuntimeError("the source broke off")

    with pytest.raises(RuntimeError, match="broke off"):
        export_model(broken(), config, tmp_path / "ours", torch.float32, context_length=32, max_shard_size="9KB")
    values["blocks.1.mlp.down.weight"][3, 4] = 1e30
    with pytest.raises(UserError, match=r"blocks\.1\.mlp\.down\.weight: holds numbers that are not finite"):
        export_model(values.items(), config, tmp_path / "ours", torch.float16, context_length=32)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_refused_and_kept(tmp_path: Path) -> None:
    config, below = small("gpt2"), tmp_path / "new" / "below"
    export(config, below)
    (tmp_path / "empty").mkdir()
    export(config, tmp_path / "empty")
    assert all(path.read_bytes() == (below / path.name).read_bytes() for path in (tmp_path / "empty").iterdir())
    assert len({path.stat().st_mode for path in below.iterdir()}) == 1, "as readable as any other"
    (tmp_path / "full").mkdir()
    for path in (tmp_path / "full" / "notes", tmp_path / "file"):
        path.write_text("mine")
    for name in ("full", "file", "empty"):
        assert "it exists already" in refusal(config, tmp_path / name)
    assert os.listdir(tmp_path / "full") == ["notes"]
    assert "cannot be written" in refusal(config, tmp_path / "file" / "below")
    assert "5GB or 500MB" in refusal(config, tmp_path / "another", max_shard_size="5 GBs")

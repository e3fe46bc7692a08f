"""What a folder of transformers must not do to whoever loads it: run code, unpickle, or make weights up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalite.errors.problems import UserError
from megalite.hf.generate import load_model, load_text_tokenizer
from tests.hf.peers import save_peer

CPU = torch.device("cpu")


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        load_model(folder, CPU)
    return str(refused.value)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_model_is_loaded_in_the_dtype_that_it_was_saved_in(tmp_path: Path) -> None:
    save_peer("llama", tmp_path, dtype=torch.bfloat16)
    model = load_model(tmp_path, CPU)
    assert model.dtype == torch.bfloat16
    assert not model.training


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    save_peer("llama", tmp_path)
    (tmp_path / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    change_config(
        tmp_path, model_type="theirs", auto_map={"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}
    )
    assert "custom code" in refusal(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_missing_weights_are_not_drawn_at_random(tmp_path: Path) -> None:
    save_peer("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight" in refusal(tmp_path)


def test_pickles_damage_and_strangers_are_refused(tmp_path: Path) -> None:
    save_peer("gpt2", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "transformers cannot load it" in refusal(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    weights.unlink()
    assert "transformers cannot load it" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "not a valid JSON file" in refusal(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    save_peer("gpt2", tmp_path)
    with pytest.raises(UserError, match="holds no tokenizer"):  # transformers would give an empty one
        load_text_tokenizer(tmp_path)

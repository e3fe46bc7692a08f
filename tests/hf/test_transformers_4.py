"""What is exported loads in transformers 4.57 as well. `long`: it installs that version, apart from the pinned one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalite.data.tokenizers import TextTokenizer, byte_tokenizer
from megalite.hf.export import export_model
from megalite.model.gpt import GPT
from megalite.prepare.prepare import bpe_tokenizer, char_tokenizer
from tests.hf.peers import SMALL, batch_of, largest_error, of_random_weights, small

TEXT = "the stone by the river lay in the light of the cloud."
LOAD = """
import json, sys
import torch, transformers
loaded = {"version": transformers.__version__}
for folder in sys.argv[1:]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True, attn_implementation="eager"
    )
    ids = tokenizer("the stone by the light", add_special_tokens=False)["input_ids"]
    loaded[folder] = {
        "class": type(tokenizer).__name__,
        "ids": ids,
        "text": tokenizer.decode(ids),
        "end": tokenizer.eos_token_id,
        "told": sorted(key for key, found in told.items() if found),
        "logits": model.eval()(input_ids=torch.tensor([ids])).logits[0].tolist(),
    }
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def transformers_4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the last transformers 4 and what it needs but torch."""
    folder = tmp_path_factory.mktemp("transformers-4")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "transformers==4.57.6"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        pytest.skip(f"transformers 4.57 cannot be installed here: {done.stderr[-300:]}")
    return folder


def export(folder: Path, family: str, tokenizer: TextTokenizer) -> GPT:
    """A model of random values as a folder of Hugging Face's, and the same as ours."""
    yarn = {"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_positions": 16}
    config = small(family, vocab_size=tokenizer.vocab_size, **(yarn if family == "qwen3" else {}))
    model, values = of_random_weights(config)
    export_model(values, config, folder, torch.float64, 32, tokenizer.end_of_document)
    tokenizer.save(folder)
    return model


@pytest.mark.long
def test_exports_load_in_transformers_4_and_compute_the_same(transformers_4: Path, tmp_path: Path) -> None:
    tokenizers = {"byte": byte_tokenizer(), "char": char_tokenizer([TEXT]), "bpe": bpe_tokenizer([TEXT] * 9, 300)}
    cases = {tmp_path / f"{family}-{name}": (family, name) for family in SMALL for name in tokenizers}
    models = {folder: export(folder, family, tokenizers[name]) for folder, (family, name) in cases.items()}
    environment = {**os.environ, "PYTHONPATH": str(transformers_4), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOAD, *map(str, cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("version") == "4.57.6"
    for folder, (family, name) in cases.items():
        loaded, tokenizer = found[str(folder)], tokenizers[name]
        ids = tokenizer.encode("the stone by the light")
        assert (loaded["class"], loaded["told"]) == ("PreTrainedTokenizerFast", []), folder
        assert (loaded["ids"], loaded["end"]) == (ids, tokenizer.end_of_document)
        assert loaded["text"] == "the stone by the light"
        ours = models[folder].logits(batch_of(torch.tensor([[*ids, ids[0]]])))
        bound = 1e-9 if family == "gpt2" else 1e-6  # transformers computes RMSNorm of fp64 models in fp32
        assert largest_error(ours, torch.tensor([loaded["logits"]], dtype=torch.float64), bound) <= 1, folder
